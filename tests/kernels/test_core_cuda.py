"""A round on a GPU, by Triton and by torch: the CPU's results, without a wait."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from sglang_tetris import core, kernels
from sglang_tetris.core import AcceptResult, Allocation, DraftTrees, VerifyPlan
from tests.reference.forests import forest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.parametrize("operations", [core, kernels], ids=["torch", "triton"]),
]

BS, MAX_NODES = 32, 21
BOUNDS = {
    "total_verify_tokens": BS * (MAX_NODES + 1),
    "num_mask_elements": BS * (MAX_NODES + 1) ** 2,
}
TREES = ("tokens", "parents", "accept_probs", "num_nodes")
# Dyadic, so that there are ties to break.
LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)


def inputs(seed: int, levels: tuple[float, ...]) -> dict[str, torch.Tensor]:
    """Return what a round needs, on the CPU; `target` is a token per row."""
    rng = np.random.default_rng(seed)
    trees = forest(rng, BS, MAX_NODES, levels)
    return {name: getattr(trees, name) for name in TREES} | {
        "draft_budget": torch.tensor(150),
        "max_drafts": torch.from_numpy(rng.integers(0, MAX_NODES, BS)),
        "weights": torch.from_numpy(rng.random(BS) + 0.1),
        "min_drafts": torch.from_numpy(rng.integers(0, 4, BS)),
        "anchors": torch.from_numpy(rng.integers(0, 4, BS)),
        "target": torch.from_numpy(rng.integers(0, 4, BOUNDS["total_verify_tokens"])),
    }


def play(
    operations, values: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, Allocation, VerifyPlan, torch.Tensor, AcceptResult]:
    """Run one round on the device of the values."""
    trees = DraftTrees(**{name: values[name] for name in TREES})
    limits = ("draft_budget", "max_drafts", "weights", "min_drafts")
    allocation = operations.select_draft_tokens(
        trees, **{name: values[name] for name in limits}
    )
    anchors = values["anchors"]
    plan = operations.build_verify_plan(
        trees, allocation, anchors=anchors, prefix_lens=anchors + 5, **BOUNDS
    )
    mask = plan.custom_mask(num_elements=20_000)
    survival = operations.path_survival(trees)
    return survival, allocation, plan, mask, core.match_tree(plan, values["target"])


def assert_same(got: Sequence, want: Sequence) -> None:
    for one, other in zip(got, want, strict=True):
        if isinstance(other, torch.Tensor):
            assert one.cpu().equal(other)
            continue
        for field in dataclasses.fields(other):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if field.name == "expected_correct_drafts":
                # A sum of floats, whose order is the device's own.
                torch.testing.assert_close(a.cpu(), b)
            elif isinstance(b, torch.Tensor):
                assert a.cpu().equal(b), field.name
            else:
                assert a == b, field.name


@pytest.mark.parametrize("levels", [(), LEVELS], ids=["rounding", "ties"])
def test_a_padded_round_equals_the_cpu_and_does_not_wait(operations, levels):
    values = inputs(0, levels)
    device = {name: value.cuda() for name, value in values.items()}
    # The first call compiles; in the second one that waits is an error.
    play(operations, device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = play(operations, device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(got, play(core, values))


def test_sizes_that_the_host_does_not_know(operations):
    plans = []
    for chosen, device in ((operations, "cuda"), (core, "cpu")):
        values = {name: value.to(device) for name, value in inputs(2, ()).items()}
        trees = DraftTrees(**{name: values[name] for name in TREES})
        allocation = chosen.select_draft_tokens(trees, draft_budget=99)
        anchors = values["anchors"]
        plans.append(
            chosen.build_verify_plan(
                trees, allocation, anchors=anchors, prefix_lens=anchors + 5
            )
        )
    assert_same(plans[:1], plans[1:])


def test_a_padded_round_can_be_captured_and_replayed(operations):
    """Within a graph no call may wait; a replay sees the tensors' new values."""
    values = inputs(1, LEVELS)
    device = {name: value.cuda() for name, value in values.items()}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        play(operations, device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = play(operations, device)
    for budget in (0, 77, 10**6):
        device["draft_budget"].fill_(budget)
        graph.replay()
        torch.cuda.synchronize()
        values["draft_budget"] = torch.tensor(budget)
        assert_same(got, play(core, values))
