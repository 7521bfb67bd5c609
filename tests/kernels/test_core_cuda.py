"""The core's torch operations on a GPU: the CPU's results, without a wait."""

import numpy as np
import pytest
import torch

from sglang_tetris.core import (
    Calibrator,
    DraftTrees,
    build_verify_plan,
    match_tree,
    path_survival,
    select_draft_tokens,
)
from tests.reference.calibration import random_labels
from tests.reference.forests import forest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

BS, MAX_NODES = 32, 21
BOUNDS = {
    "total_verify_tokens": BS * (MAX_NODES + 1),
    "num_mask_elements": BS * (MAX_NODES + 1) ** 2,
}


def round_of(device: str) -> list[torch.Tensor]:
    rng = np.random.default_rng(0)
    cpu = forest(rng, BS, MAX_NODES)
    trees = DraftTrees(
        tokens=cpu.tokens.to(device),
        parents=cpu.parents.to(device),
        accept_probs=cpu.accept_probs.to(device),
        num_nodes=cpu.num_nodes.to(device),
    )
    caps = torch.from_numpy(rng.integers(0, MAX_NODES, BS)).to(device)
    weights = torch.from_numpy(rng.random(BS) + 0.1).to(device)
    anchors = torch.from_numpy(rng.integers(0, 4, BS)).to(device)
    rows = BOUNDS["total_verify_tokens"]
    target = torch.from_numpy(rng.integers(0, 4, rows)).to(device)
    budget = torch.tensor(150, device=device)
    if device != "cpu":
        # From here on a call that waits is an error.
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    survival = path_survival(trees)
    allocation = select_draft_tokens(
        trees, draft_budget=budget, max_drafts=caps, weights=weights
    )
    plan = build_verify_plan(
        trees, allocation, anchors=anchors, prefix_lens=anchors + 5, **BOUNDS
    )
    mask = plan.custom_mask(num_elements=20_000)
    result = match_tree(plan, target)
    if device != "cpu":
        torch.cuda.set_sync_debug_mode("default")
    return [
        tensor.cpu()
        for tensor in (
            survival,
            allocation.keep,
            allocation.verify_lens,
            plan.input_ids,
            plan.positions,
            plan.qo_indptr,
            plan.node_ids,
            plan.retrieve_index,
            plan.retrieve_next_token,
            plan.retrieve_next_sibling,
            plan.retrieve_parent,
            plan.tree_mask,
            mask,
            result.accept_index,
            result.accept_lens,
            result.accept_tokens,
        )
    ]


def test_a_padded_round_equals_the_cpu_and_does_not_wait():
    for got, want in zip(round_of("cuda"), round_of("cpu"), strict=True):
        assert got.equal(want)


def calibrated_on(device: str) -> torch.Tensor:
    rng = np.random.default_rng(2)
    cpu = forest(rng, BS, MAX_NODES)
    trees = DraftTrees(
        tokens=cpu.tokens.to(device),
        parents=cpu.parents.to(device),
        accept_probs=cpu.accept_probs.to(device),
        num_nodes=cpu.num_nodes.to(device),
    )
    classes = torch.from_numpy(rng.integers(0, 8, BS)).to(device)
    calibrator = Calibrator()
    # The first call on a device makes its tables there.
    calibrator.calibrate_trees(trees, classes)
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    for _ in range(3):
        calibrator.update(*random_labels(rng, 200))
        calibrated = calibrator.calibrate_trees(trees, classes).accept_probs
    if device != "cpu":
        torch.cuda.set_sync_debug_mode("default")
    return calibrated.cpu()


def test_calibrated_trees_equal_the_cpus_and_do_not_wait():
    assert calibrated_on("cuda").equal(calibrated_on("cpu"))


def test_a_padded_round_can_be_captured_and_replayed():
    """Within a graph no call may wait; a replay sees the tensors' new values."""
    cpu = forest(np.random.default_rng(1), BS, MAX_NODES)
    trees = DraftTrees(
        tokens=cpu.tokens.cuda(),
        parents=cpu.parents.cuda(),
        accept_probs=cpu.accept_probs.cuda(),
        num_nodes=cpu.num_nodes.cuda(),
    )
    zeros = torch.zeros(BS, dtype=torch.int64, device="cuda")
    budget = torch.tensor(0, device="cuda")

    def run():
        allocation = select_draft_tokens(trees, draft_budget=budget)
        plan = build_verify_plan(
            trees, allocation, anchors=zeros, prefix_lens=zeros, **BOUNDS
        )
        return allocation, match_tree(plan, plan.input_ids)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        allocation, _result = run()
    for value in (0, 77, 10**6):
        budget.fill_(value)
        graph.replay()
        want = select_draft_tokens(cpu, draft_budget=value)
        assert allocation.keep.cpu().equal(want.keep)
