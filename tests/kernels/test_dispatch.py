"""sglang_tetris.kernels: the right backend for a device, every argument passed on."""

import dataclasses
import importlib.util
import subprocess
import sys

import pytest
import torch

from sglang_tetris import core, kernels
from sglang_tetris.kernels import dispatch
from tests.reference.forests import trees_of

OPERATIONS = ("path_survival", "select_draft_tokens", "build_verify_plan")


@pytest.mark.parametrize("device_type", ["cpu", "meta"])
def test_other_devices_go_to_the_core(device_type):
    operations = dispatch.operations_on(device_type)
    assert all(operations[name] is getattr(core, name) for name in OPERATIONS)


def test_a_gpu_goes_to_triton():
    pytest.importorskip("triton")
    operations = dispatch.operations_on("cuda")
    for name in OPERATIONS:
        assert operations[name].__name__ == name
        assert operations[name].__module__.endswith("_triton")


def test_a_gpu_without_triton_goes_to_the_core(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    # Past the cache of the process.
    operations = dispatch.operations_on.__wrapped__("cuda")
    assert operations["build_verify_plan"] is core.build_verify_plan


def test_triton_is_imported_on_first_use_only():
    code = (
        "import sys, torch\n"
        "before = 'triton' in sys.modules\n"
        "import sglang_tetris.kernels\n"
        "assert ('triton' in sys.modules) == before\n"
        "assert 'sglang_tetris.kernels.select_triton' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_argument_arrives():
    trees = trees_of(
        [(1, -1, 0.9), (2, -1, 0.8), (3, -1, 0.7)],
        [(4, -1, 0.5), (5, -1, 0.4), (6, 0, 0.6)],
        [(7, -1, 0.1), (8, 0, 0.5)],
    )
    assert kernels.path_survival(trees).equal(core.path_survival(trees))
    arguments = {
        "draft_budget": 4,
        "max_drafts": torch.tensor([1, 9, 9]),
        "weights": torch.tensor([1.0, 0.1, 2.0]),
        "min_drafts": torch.tensor([0, 2, 0]),
    }
    allocation = kernels.select_draft_tokens(trees, **arguments)
    want = core.select_draft_tokens(trees, **arguments)
    assert allocation.keep.equal(want.keep)
    # Each of the three limits changes the result.
    for name in ("max_drafts", "weights", "min_drafts"):
        less = {key: value for key, value in arguments.items() if key != name}
        assert not core.select_draft_tokens(trees, **less).keep.equal(want.keep)
    arguments = {"anchors": torch.arange(3), "prefix_lens": torch.arange(3) + 7}
    for bounds in ({}, {"total_verify_tokens": 30, "num_mask_elements": 200}):
        got = kernels.build_verify_plan(trees, want, **arguments, **bounds)
        plan = core.build_verify_plan(trees, want, **arguments, **bounds)
        for field in dataclasses.fields(plan):
            one, other = getattr(got, field.name), getattr(plan, field.name)
            assert one.equal(other) if isinstance(one, torch.Tensor) else one == other
