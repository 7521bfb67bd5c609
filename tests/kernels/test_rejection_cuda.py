"""Rejection verification on a GPU: the CPU's results, without a wait."""

import numpy as np
import pytest
import torch

from sglang_tetris.core import (
    DraftTrees,
    build_verify_plan,
    max_draft_prob,
    select_draft_tokens,
    verify_chains,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

BS = 32


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
