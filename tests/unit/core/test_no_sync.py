"""With sizes known to the host, nothing reads a value back from the device.

Shown twice without an accelerator: on `meta` tensors, which have no values at all, and
by watching the calls of a CPU run for those that would wait.
"""

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from sglang_tetris.core import (
    Calibrator,
    DraftTrees,
    build_verify_plan,
    match_tree,
    path_survival,
    select_draft_tokens,
)
from sglang_tetris.core.accept import match_tree_torch
from sglang_tetris.core.allocator import select_draft_tokens_torch
from sglang_tetris.core.calibration_map import MapTensors, calibrated_torch
from sglang_tetris.core.node_ranks import depths_and_ranks_torch
from tests.reference.forests import forest

WAITING = ("item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique")
CONVERSIONS = ("__bool__", "__int__", "__float__", "__index__")


class WaitWatch(TorchFunctionMode):
    """Collects the names of calls whose result needs a value from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in WAITING + CONVERSIONS:
            self.seen.append(name)
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(getattr(part, "dtype", None) == torch.bool for part in index):
                self.seen.append(f"{name} with a mask")
        return func(*args, **(kwargs or {}))


def test_the_watch_sees_waits():
    ones = torch.ones(3)
    with WaitWatch() as watch:
        ones.sum().item()
        ones[ones > 0]
        ones.nonzero()
        if ones.any():
            int(ones[0])
    want = ["item", "__getitem__ with a mask", "nonzero", "__bool__", "__int__"]
    assert watch.seen == want


@pytest.mark.parametrize("budget_on_device", [False, True])
def test_a_round_on_a_device_without_values(budget_on_device):
    device = "meta"
    ints = torch.zeros(4, 7, dtype=torch.int64, device=device)
    trees = DraftTrees(
        tokens=ints,
        parents=ints,
        accept_probs=torch.zeros(4, 7, device=device),
        num_nodes=ints[:, 0],
    )
    calibrator = Calibrator()
    trees = calibrator.calibrate_trees(trees, ints[:, 0])
    calibrator.update([0.5], [1], [0], [0], [True])
    trees = calibrator.calibrate_trees(trees, ints[:, 0])
    assert path_survival(trees).shape == (4, 7)
    budget = torch.tensor(5, device=device) if budget_on_device else 5
    allocation = select_draft_tokens(
        trees,
        draft_budget=budget,
        max_drafts=ints[:, 0],
        weights=torch.ones(4, device=device),
    )
    plan = build_verify_plan(
        trees,
        allocation,
        anchors=ints[:, 0],
        prefix_lens=ints[:, 0],
        total_verify_tokens=20,
        num_mask_elements=100,
    )
    assert plan.input_ids.shape == (20,)
    assert plan.tree_mask.shape == (100,)
    assert plan.custom_mask(num_elements=300).shape == (300,)
    assert match_tree(plan, plan.input_ids).accept_index.shape == (4, 8)
    with pytest.raises(ValueError, match=r"^max_drafts must be on meta, got cpu"):
        select_draft_tokens(trees, draft_budget=1, max_drafts=torch.ones(4).int())


def test_torch_operations_of_a_round_do_not_wait():
    trees = forest(np.random.default_rng(0), 5, 11)
    # A depth bound, as a server has it: without one, a CPU looks the depth up.
    trees = DraftTrees(
        tokens=trees.tokens,
        parents=trees.parents,
        accept_probs=trees.accept_probs,
        num_nodes=trees.num_nodes,
        max_depth=11,
    )
    allocation = select_draft_tokens(trees, draft_budget=20)
    zeros = torch.zeros(5, dtype=torch.int64)
    plan = build_verify_plan(
        trees,
        allocation,
        anchors=zeros,
        prefix_lens=zeros + 3,
        total_verify_tokens=30,
        num_mask_elements=500,
    )
    maps = MapTensors(torch.device("cpu"))
    with WaitWatch() as watch:
        maps.refresh(Calibrator()._table, version=1)
        depths, ranks = depths_and_ranks_torch(trees)
        calibrated_torch(trees.accept_probs, depths, ranks, zeros, maps)
        select_draft_tokens_torch(trees, torch.tensor(20), zeros + 4, torch.ones(5))
        plan.custom_mask(num_elements=900)
        match_tree_torch(plan, plan.input_ids)
    assert watch.seen == []
