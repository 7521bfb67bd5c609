"""What is verified in a round: the budget, the best drafts under it, their rows."""

from typing import Any

import torch

from sglang_tetris.adapter.round_planner import RoundPlanner
from sglang_tetris.adapter.round_view import RoundView
from sglang_tetris.adapter.service_levels import ServiceLevels
from sglang_tetris.adapter.undrafted import anchor_plan, none_kept
from sglang_tetris.core import Allocation, DraftTrees, VerifyPlan
from sglang_tetris.kernels import build_verify_plan, select_draft_tokens


def allocate(
    trees: DraftTrees,
    view: RoundView,
    reqs: list[Any],
    planner: RoundPlanner,
    levels: ServiceLevels,
    min_drafts: int,
) -> tuple[int, Allocation]:
    """Return the budget of this round, and what is verified.

    levels      says how much a draft of each request counts
    min_drafts  drafts that each request gets before any gets more
    """
    if not trees.max_nodes:
        return 0, none_kept(trees.batch_size, trees.tokens.device)
    device = trees.tokens.device
    caps = torch.tensor(view.caps, dtype=torch.int64, device=device)
    weights, worth = levels.weights(reqs, view.settings), None
    if weights is not None:
        worth = torch.tensor(weights, dtype=torch.float32, device=device)
    everything = select_draft_tokens(
        trees, draft_budget=trees.tokens.numel(), max_drafts=caps
    )
    draft_budget = planner.draft_budget(trees, view.load, everything.keep, worth)
    if min_drafts and planner.is_auto:
        # The floor is the user's word, however little the price leaves.
        floors = (everything.verify_lens - 1).clamp(max=min_drafts)
        draft_budget = max(draft_budget, int(floors.sum()))
    allocation = select_draft_tokens(
        trees,
        draft_budget=draft_budget,
        max_drafts=caps,
        weights=worth,
        min_drafts=min_drafts or None,
    )
    return draft_budget, allocation


def verify_plan(trees: DraftTrees, allocation: Allocation, batch: Any) -> VerifyPlan:
    """Return the rows that the target runs, each request's anchor first."""
    anchors = batch.spec_info.bonus_tokens.to(torch.int64)
    prefix_lens = batch.seq_lens.to(torch.int64)
    if not trees.max_nodes:
        return anchor_plan(anchors, prefix_lens)
    return build_verify_plan(
        trees, allocation, anchors=anchors, prefix_lens=prefix_lens
    )
