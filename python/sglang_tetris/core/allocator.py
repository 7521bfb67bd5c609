"""Which draft nodes of the whole batch to verify, given a budget.

    maximise    sum over kept nodes of weight(request) * survival(node)
    such that   the kept nodes of each request are closed under parents,
                at most draft_budget nodes are kept, at most max_drafts per request,
                at least min_drafts per request where there are as many

The best set is simply the first draft_budget nodes in the order: weighted survival,
higher first; then depth, shallower first; then request, lower first; then node, lower
first, nodes past their request's cap left out. A parent comes before its children in
that order, because its weighted survival is at least theirs and it is shallower, so
every beginning of the order is closed under parents; and no set of that size has a
larger sum. The paper's method (arXiv 2502.15197, algorithm 1) is the case of chains
without weights, caps and floors.

With floors, the first min(min_drafts, cap, nodes) of each request, its floor nodes, go
ahead of all others, in the same order among themselves. Within a request that moves
nothing, so parents still come first and every beginning stays closed. A budget that
covers the floors buys them all, and then the best of the rest: the optimum under the
floors. A smaller one buys the best of the floor nodes: the optimum under the floors
taken as caps.

Not decided here: how large the budget is (core.budget) and how the probabilities were
estimated.
"""

import torch

from sglang_tetris.core.backend import loops_for
from sglang_tetris.core.errors import check_count, check_tensor, on_plain_cpu
from sglang_tetris.core.survival import node_depths_torch, path_survival_torch
from sglang_tetris.core.types import Allocation, DraftTrees

# A number for the batch or each request: known to the host, or in a tensor.
Count = int | torch.Tensor

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# A sort key of 63 bits: in the floor or not; 31 bits of the weighted survival, whose
# sign is positive; 31 bits of shallowness.
_DEEPEST = 2**31 - 1
_FLOOR_BIT = 1 << 62


def select_draft_tokens(
    trees: DraftTrees,
    *,
    draft_budget: int | torch.Tensor,
    max_drafts: int | torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    min_drafts: int | torch.Tensor | None = None,
) -> Allocation:
    """Keep the `draft_budget` draft nodes of the batch that are most worth verifying.

    The kept set maximises the weighted expected number of correct drafts among all
    ancestor-closed sets under the budget, the caps and the floors; ties are broken as
    the module says, compared on ``weights * survival`` as computed in float32. Exactly
    min(draft_budget, nodes available under the caps) nodes are kept: nodes of survival
    0 too when the budget reaches them, padding never.

    draft_budget  int >= 0 or 0-d int tensor, drafts in all, anchors not counted
    max_drafts    int >= 0 or [bs] int tensor, cap on each request; None = no cap
    weights       [bs] positive floats, worth of a request's drafts; None = all equal
    min_drafts    int >= 0 or [bs] int tensor, floor of each request: that many of its
                  best nodes, or as many as its cap and its nodes allow, go before
                  every other node of the batch; None = no floor

    Returns an Allocation whose `expected_correct_drafts` is the plain sum of survival,
    without weights. Nothing waits for an accelerator; a tensor there is not checked for
    its values. Raises ValueError naming the argument and its value.
    """
    arguments = checked_selection(trees, draft_budget, max_drafts, weights, min_drafts)
    loops = loops_for(trees.tokens)
    select = select_draft_tokens_torch if loops is None else loops.select_draft_tokens
    allocation: Allocation = select(trees, *arguments)
    return allocation


def select_draft_tokens_torch(
    trees: DraftTrees,
    draft_budget: Count,
    max_drafts: Count | None,
    weights: torch.Tensor | None,
    min_drafts: Count | None,
) -> Allocation:
    """`select_draft_tokens` in torch operations, on any device; arguments checked."""
    survival = path_survival_torch(trees)
    value = survival if weights is None else survival * weights[:, None]
    # The bits of non-negative floats order like the floats; + 0.0 turns -0.0 into 0.0.
    bits = (value + 0.0).view(torch.int32).to(torch.int64)
    key = (bits << 31) | (_DEEPEST - node_depths_torch(trees))
    key = torch.where(trees.is_node(), key, -1)
    if max_drafts is not None or min_drafts is not None:
        order = key.argsort(dim=1, descending=True, stable=True)
        ranks = torch.arange(trees.max_nodes, device=key.device).expand_as(order)
        rank = torch.empty_like(order).scatter_(1, order, ranks)
        if min_drafts is not None:
            floor = (rank < _by_row(min_drafts)) & (key >= 0)
            key = torch.where(floor, key | _FLOOR_BIT, key)
        if max_drafts is not None:
            key = torch.where(rank < _by_row(max_drafts), key, -1)
    flat = key.flatten()
    order = flat.argsort(descending=True, stable=True)
    in_budget = torch.arange(flat.shape[0], device=key.device) < draft_budget
    admitted = in_budget & (flat[order] >= 0)
    keep = torch.empty_like(admitted).scatter_(0, order, admitted).view(key.shape)
    expected = torch.where(keep, survival, 0.0).sum(1, dtype=torch.float64)
    return Allocation(
        keep=keep,
        verify_lens=keep.sum(1, dtype=torch.int32) + 1,
        expected_correct_drafts=expected.to(torch.float32),
    )


def checked_selection(
    trees: DraftTrees,
    draft_budget: Count,
    max_drafts: Count | None,
    weights: torch.Tensor | None,
    min_drafts: Count | None,
) -> tuple[Count, Count | None, torch.Tensor | None, Count | None]:
    """Return the arguments of a selection as every backend takes them, or raise.

    Counts no larger than there are nodes, or int64 tensors; weights in float32.
    """
    return (
        _checked_budget(trees, draft_budget),
        _checked_counts("max_drafts", trees, max_drafts),
        None if weights is None else _checked_weights(trees, weights),
        _checked_counts("min_drafts", trees, min_drafts),
    )


def _by_row(counts: Count) -> Count:
    return counts[:, None] if isinstance(counts, torch.Tensor) else counts


def _checked_budget(trees: DraftTrees, value: Count) -> Count:
    if not isinstance(value, torch.Tensor):
        # More than there are nodes means all of them, and fits 64 bits.
        return min(check_count("draft_budget", value), trees.tokens.numel())
    check_tensor("draft_budget", value, "[]", (), _INTS)
    if on_plain_cpu(value):
        return min(check_count("draft_budget", int(value)), trees.tokens.numel())
    _check_same_device("draft_budget", value, trees)
    return value


def _checked_counts(name: str, trees: DraftTrees, value: Count | None) -> Count | None:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        return min(check_count(name, value), trees.max_nodes)
    check_tensor(name, value, "[bs]", (trees.batch_size,), _INTS)
    _check_same_device(name, value, trees)
    if on_plain_cpu(value) and (value < 0).any():
        row = int((value < 0).nonzero()[0, 0])
        raise ValueError(f"{name} must be at least 0, got {int(value[row])} at [{row}]")
    return value.to(torch.int64)


def _checked_weights(trees: DraftTrees, value: torch.Tensor) -> torch.Tensor:
    check_tensor("weights", value, "[bs]", (trees.batch_size,), _FLOATS)
    _check_same_device("weights", value, trees)
    weights = value.to(torch.float32)
    if on_plain_cpu(weights) and weights.numel():
        lowest, highest = (float(bound) for bound in weights.aminmax())
        # Written so that NaN, which takes both ends, is refused as well.
        if not (lowest > 0 and highest < torch.inf):
            unusable = ~((weights > 0) & (weights < torch.inf))
            row = int(unusable.nonzero()[0, 0])
            raise ValueError(
                "weights must be positive and finite in float32, "
                f"got {value[row].item()} at [{row}]"
            )
    return weights


def _check_same_device(name: str, value: torch.Tensor, trees: DraftTrees) -> None:
    if value.device != trees.tokens.device:
        raise ValueError(f"{name} must be on {trees.tokens.device}, got {value.device}")
