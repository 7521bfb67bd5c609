"""The core's torch operations on a GPU: the CPU's results, without a wait."""

import numpy as np
import pytest
import torch

from sglang_tetris.core import (
    DraftTrees,
    build_verify_plan,
    match_tree,
    max_draft_prob,
    path_survival,
    select_draft_tokens,
    verify_chains,
)
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


def rejected_chains(device: str, block: bool, hot: bool) -> list[torch.Tensor]:
    """Chains of four drafts over 1000 tokens, half of which the draft knows."""
    rng = np.random.default_rng(2)
    known = rng.permutation(1000)[:500]
    # Most of every law is the same, so that drafts are accepted about every other time.
    shared = rng.dirichlet(np.full(500, 0.05))
    laws = (2 * shared + rng.dirichlet(np.full(500, 0.05), (BS, 4))) / 3
    drafts = known[(laws.cumsum(-1) > rng.random((BS, 4, 1))).argmax(-1)]
    target = rng.dirichlet(np.full(1000, 0.05), BS * 5) / 3
    target[:, known] += 2 * shared / 3
    if not hot:
        whole = np.zeros((BS, 4, 1000))
        whole[..., known] = laws
        laws = whole
    coins, final = rng.random((BS, 4)), rng.random(BS)
    put = {"device": device}
    draft_probs = torch.tensor(laws, dtype=torch.float32, **put)
    trees = DraftTrees(
        tokens=torch.tensor(drafts, **put),
        parents=torch.arange(-1, 3, **put).repeat(BS, 1),
        accept_probs=max_draft_prob(draft_probs),
        num_nodes=torch.full((BS,), 4, **put),
        max_depth=4,
    )
    arguments = {
        "target_probs": torch.tensor(target, dtype=torch.float32, **put),
        "draft_probs": draft_probs,
        "uniforms": torch.tensor(coins, **put),
        "uniforms_final": torch.tensor(final, **put),
        "draft_token_ids": torch.tensor(known, **put) if hot else None,
    }
    zeros = torch.zeros(BS, dtype=torch.int64, **put)
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    plan = build_verify_plan(
        trees,
        select_draft_tokens(trees, draft_budget=80),
        anchors=zeros,
        prefix_lens=zeros,
        total_verify_tokens=BS * 5,
        num_mask_elements=BS * 25,
    )
    result = verify_chains(plan, **arguments, block=block)
    if device != "cpu":
        torch.cuda.set_sync_debug_mode("default")
    return [result.accept_lens.cpu(), result.accept_tokens.cpu()]


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("hot", [False, True])
def test_rejection_equals_the_cpu_and_does_not_wait(block, hot):
    """Sums are rounded in another order; no seeded coin here is that near an edge."""
    want = rejected_chains("cpu", block, hot)
    assert want[0].min() == 1
    assert want[0].max() >= 4
    for got, cpu in zip(rejected_chains("cuda", block, hot), want, strict=True):
        assert got.equal(cpu)
