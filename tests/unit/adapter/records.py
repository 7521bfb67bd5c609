"""A finished round from trees and the target's tokens, for those who are told of it."""

from types import SimpleNamespace

import torch

from sglang_tetris.adapter.request_settings import RequestSettings
from sglang_tetris.adapter.round_record import RoundRecord
from sglang_tetris.adapter.round_view import RoundView
from sglang_tetris.core import (
    DraftTrees,
    build_verify_plan,
    match_tree,
    select_draft_tokens,
)
from sglang_tetris.core.auto_policy import Load, RoundPlan


def finished(
    trees: DraftTrees,
    target_tokens: list[int],
    *,
    budget: int,
    reqs: list | None = None,
    limits: list[int | None] | None = None,
    sampling_class: int = 0,
    cut_short: tuple[int, ...] = (),
    decided: RoundPlan | None = None,
) -> RoundRecord:
    """Return the round in which the target chose these tokens at the verified rows."""
    bs = trees.batch_size
    allocation = select_draft_tokens(trees, draft_budget=budget)
    prefix = torch.arange(5, 5 + bs)
    plan = build_verify_plan(
        trees, allocation, anchors=torch.ones_like(prefix), prefix_lens=prefix
    )
    accepted = match_tree(plan, torch.tensor(target_tokens))
    settings = [
        RequestSettings(
            limit=limit, weight=1.0, target_tpot_ms=None, sampling_class=sampling_class
        )
        for limit in limits or [None] * bs
    ]
    nodes = trees.num_nodes.tolist()
    return RoundRecord(
        reqs=reqs
        or [
            SimpleNamespace(rid=f"r-{row}", origin_input_ids=[1] * 3, output_ids=[1, 1])
            for row in range(bs)
        ],
        view=RoundView(
            settings=settings,
            caps=[trees.max_nodes] * bs,
            pool_rows=list(range(bs)),
            seq_lens=prefix.tolist(),
            load=Load(
                batch_size=bs, num_drafting=bs, total_kv_tokens=int(prefix.sum())
            ),
        ),
        decided=decided or RoundPlan(depth=2),
        rows=[row for row in range(bs) if nodes[row]],
        drafted=trees,
        trees=trees,
        draft_budget=budget,
        allocation=allocation,
        plan=plan,
        accepted=accepted,
        accept_lens=accepted.accept_lens.tolist(),
        cut_short=list(cut_short),
    )
