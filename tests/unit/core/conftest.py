"""One test body, every implementation.

Triton's interpreter must be chosen before triton is first imported, and then holds for
the whole process. So the Triton kernels have runs of these files to themselves, with
TRITON_INTERPRET=1: tests/kernels/test_triton_interpreter.py starts them.
"""

import os
import random

import pytest

from sglang_tetris.core import backend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Interpreted kernels take some 0.1 s a call: of many like cases a few.
FEW = 3


@pytest.fixture(params=["triton"] if INTERPRETED else ["numba", "torch"])
def implementation(request, monkeypatch):
    """Run a test on the compiled loops, on the torch operations or on the kernels."""
    if request.param == "triton":
        from sglang_tetris.kernels import plan_triton, select_triton, tree_rows
        from sglang_tetris.kernels.dispatch import triton_operations

        # So small that the tests' small batches take several of each.
        monkeypatch.setattr(select_triton, "CHUNK", 32)
        monkeypatch.setattr(plan_triton, "LENS_CHUNK", 2)
        monkeypatch.setattr(tree_rows, "LONGEST_TILE", 8)
        for name, operation in triton_operations().items():
            monkeypatch.setattr(request.module, name, operation, raising=False)
        return request.param
    if request.param == "torch":
        monkeypatch.setattr(backend, "load_loops", lambda: None)
    else:
        pytest.importorskip("numba")
    assert backend.cpu_backend() == request.param
    return request.param


@pytest.fixture
def some(request):
    """Return all of the cases, or a few, in order, for an implementation too slow."""

    def choose(cases):
        cases = list(cases)
        if not INTERPRETED or len(cases) <= FEW:
            return cases
        few = random.Random(request.node.name).sample(range(len(cases)), FEW)
        return [cases[i] for i in sorted(few)]

    return choose


def pytest_collection_modifyitems(config, items):
    """Interpreted, leave out most seeds of the tests that have many."""
    if not INTERPRETED:
        return
    late = [
        item
        for item in items
        if getattr(item, "callspec", None)
        and item.callspec.params.get("seed", 0) >= FEW
    ]
    config.hook.pytest_deselected(items=late)
    items[:] = [item for item in items if item not in late]
