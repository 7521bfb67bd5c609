"""Which drafts of a round are verified: the budget, then the best under it."""

from functools import lru_cache
from typing import Any

import torch

from sglang_tetris.adapter.draft_rows import no_drafts
from sglang_tetris.adapter.round_planner import RoundPlanner
from sglang_tetris.adapter.round_view import RoundView
from sglang_tetris.adapter.service_levels import ServiceLevels
from sglang_tetris.core import Allocation, DraftTrees
from sglang_tetris.kernels import select_draft_tokens


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
        return 0, _nothing(trees.batch_size, trees.tokens.device)
    device = trees.tokens.device
    caps = torch.tensor(view.caps, dtype=torch.int64, device=device)
    weights, worth = levels.weights(reqs, view.settings), None
    if weights is not None:
        worth = torch.tensor(weights, dtype=torch.float32, device=device)
    everything = select_draft_tokens(
        trees, draft_budget=trees.tokens.numel(), max_drafts=caps
    )
    draft_budget = planner.draft_budget(trees, view.load, everything.keep, worth)
    allocation = select_draft_tokens(
        trees,
        draft_budget=draft_budget,
        max_drafts=caps,
        weights=worth,
        min_drafts=min_drafts or None,
    )
    return draft_budget, allocation


@lru_cache(maxsize=512)
def _nothing(bs: int, device: torch.device) -> Allocation:
    return select_draft_tokens(no_drafts(bs, device), draft_budget=0)
