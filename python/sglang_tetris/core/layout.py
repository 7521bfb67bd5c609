"""Lays the kept trees out as one ragged batch of rows for the target to verify.

    qo_indptr = [0, cumsum(verify_lens)],  verify_len = 1 + kept nodes
    row (request, 0) is the anchor; rows (request, 1), ... its kept nodes, ascending
    position = prefix_len + depth; input_ids = anchor token, then draft tokens

Links say how rows hang together, as places within the request: first child, next
sibling (ascending) and parent. Siblings in ascending order are what makes acceptance
follow the lower of two equal siblings.

Sizes. Exact sizes (T rows, M mask elements, tables as wide as the longest request) need
one look at the lengths, which waits for an accelerator. A host that has bounds gives
`total_verify_tokens` and `num_mask_elements`; every shape then follows from the
arguments' shapes and these bounds alone, and nothing waits.
"""

import torch

from sglang_tetris.core.backend import loops_for
from sglang_tetris.core.errors import check_count, check_tensor, on_plain_cpu
from sglang_tetris.core.survival import node_depths_torch
from sglang_tetris.core.tree_mask import flatten_mask_torch, reachable_torch
from sglang_tetris.core.types import INDEX_DTYPES, Allocation, DraftTrees, VerifyPlan


def build_verify_plan(
    trees: DraftTrees,
    allocation: Allocation,
    *,
    anchors: torch.Tensor,
    prefix_lens: torch.Tensor,
    total_verify_tokens: int | None = None,
    num_mask_elements: int | None = None,
) -> VerifyPlan:
    """Flatten the kept nodes of every request, its anchor first, into a VerifyPlan.

    anchors              [bs] int64 or int32, token at each tree's root
    prefix_lens          [bs] int64 or int32, tokens in the KV cache ahead of the anchor
    total_verify_tokens  host bound on sum(verify_lens); pads the [T] outputs
    num_mask_elements    host bound on sum(verify_lens ** 2); pads `tree_mask`

    With both bounds nothing waits for an accelerator. The tables are then
    W = min(max_nodes, total_verify_tokens - bs) + 1 wide, and the plan's `max_depth` is
    the smaller of W - 1 and the trees' own bound. Without one of the two, exact sizes
    are computed (one wait), `max_depth` being the depth of the deepest kept node.

    Raises ValueError naming the argument and its value; on a CPU also for an allocation
    that is not closed under parents or keeps padding, and for a bound that is too low.
    On an accelerator rows past a bound are dropped.
    """
    anchors, prefix_lens = checked_plan(
        trees, allocation, anchors, prefix_lens, total_verify_tokens, num_mask_elements
    )
    loops = loops_for(trees.tokens)
    build = build_verify_plan_torch if loops is None else loops.build_verify_plan
    plan: VerifyPlan = build(
        trees, allocation, anchors, prefix_lens, total_verify_tokens, num_mask_elements
    )
    return plan


def checked_plan(
    trees: DraftTrees,
    allocation: Allocation,
    anchors: torch.Tensor,
    prefix_lens: torch.Tensor,
    total_verify_tokens: int | None,
    num_mask_elements: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return anchors and prefix lengths in int64, or raise for an unusable argument."""
    rows, device = (trees.batch_size,), trees.tokens.device
    keep, shape = allocation.keep, trees.tokens.shape
    layout = "[bs, max_nodes]"
    check_tensor("allocation.keep", keep, layout, shape, torch.bool, device)
    check_tensor("anchors", anchors, "[bs]", rows, INDEX_DTYPES, device)
    check_tensor("prefix_lens", prefix_lens, "[bs]", rows, INDEX_DTYPES, device)
    for name, bound in (
        ("total_verify_tokens", total_verify_tokens),
        ("num_mask_elements", num_mask_elements),
    ):
        if bound is not None:
            # Each request has an anchor: a row, and a mask element of its own.
            check_count(name, bound, minimum=trees.batch_size)
    return anchors.to(torch.int64), prefix_lens.to(torch.int64)


def build_verify_plan_torch(
    trees: DraftTrees,
    allocation: Allocation,
    anchors: torch.Tensor,
    prefix_lens: torch.Tensor,
    total_verify_tokens: int | None,
    num_mask_elements: int | None,
) -> VerifyPlan:
    """`build_verify_plan` in torch operations, on any device; arguments checked."""
    device = trees.tokens.device
    depth = node_depths_torch(trees)
    if on_plain_cpu(trees.tokens):
        check_plan_values_host(trees, allocation, prefix_lens, depth)
    lens = allocation.verify_lens.to(torch.int64)
    num_rows, num_elements, width, max_depth = plan_sizes(
        trees, allocation, total_verify_tokens, num_mask_elements, depth
    )
    if trees.batch_size == 0:
        return _empty_plan(num_rows, num_elements, width, max_depth, device)

    # Dense tables [bs, width], by place: the anchor, then the kept nodes ascending.
    keep = allocation.keep.to(torch.uint8)
    kept_first = keep.argsort(dim=1, descending=True, stable=True)
    kept_first = kept_first[:, : width - 1]
    place_of = allocation.keep.cumsum(1)
    has_parent = torch.where(trees.is_node(), trees.parents, -1)
    parent_place = torch.where(
        has_parent >= 0, place_of.gather(1, has_parent.clamp(min=0)), 0
    )
    places = torch.arange(width, device=device)
    filled = places < lens[:, None]
    before = torch.nn.functional.pad
    node_at = torch.where(filled, before(kept_first, (1, 0), value=-1), -1)
    parent_at = before(parent_place.gather(1, kept_first), (1, 0), value=-1)
    parent_at = torch.where(filled, parent_at, -1)
    token_at = torch.cat([anchors[:, None], trees.tokens.gather(1, kept_first)], 1)
    position_at = prefix_lens[:, None] + before(depth.gather(1, kept_first), (1, 0))

    indptr = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
    row = torch.arange(num_rows, device=device)
    request = torch.searchsorted(indptr[1:], row, right=True)
    live = request < trees.batch_size
    request = request.clamp(max=trees.batch_size - 1)
    place = (row - indptr[request]).clamp(max=width - 1)
    next_token, next_sibling = _links_torch(parent_at)
    return VerifyPlan(
        input_ids=torch.where(live, token_at[request, place], 0),
        positions=torch.where(live, position_at[request, place], 0),
        qo_indptr=indptr.to(torch.int32),
        node_ids=torch.where(live, node_at[request, place], -1),
        retrieve_index=torch.where(filled, indptr[:-1, None] + places, -1),
        retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling,
        retrieve_parent=parent_at,
        tree_mask=flatten_mask_torch(
            reachable_torch(parent_at, max_depth), lens, num_elements
        ),
        prefix_lens=prefix_lens,
        max_depth=max_depth,
    )


def plan_sizes(
    trees: DraftTrees,
    allocation: Allocation,
    total_verify_tokens: int | None,
    num_mask_elements: int | None,
    depth: torch.Tensor | None = None,
) -> tuple[int, int, int, int]:
    """Rows, mask elements, table width and depth, from bounds or (one wait) exactly.

    depth is that of the nodes, where it is known already. On a CPU bounds are checked.
    """
    bounded = total_verify_tokens is not None and num_mask_elements is not None
    num_rows, num_elements, width, max_depth = 0, 0, 1, 0
    if not bounded or on_plain_cpu(trees.tokens):
        if depth is None:
            depth = node_depths_torch(trees)
        num_rows, num_elements, width, max_depth = _exact_sizes_host(allocation, depth)
    if total_verify_tokens is not None:
        check_bound_host("total_verify_tokens", total_verify_tokens, num_rows)
        num_rows = total_verify_tokens
    if num_mask_elements is not None:
        check_bound_host("num_mask_elements", num_mask_elements, num_elements)
        num_elements = num_mask_elements
    if bounded:
        width, max_depth = padded_width(trees, num_rows)
    return num_rows, num_elements, width, max_depth


def padded_width(trees: DraftTrees, total_verify_tokens: int) -> tuple[int, int]:
    """Return table width and depth bound of a plan whose sizes the host has bounded."""
    width = min(trees.max_nodes, total_verify_tokens - trees.batch_size) + 1
    deepest = width - 1 if trees.max_depth is None else trees.max_depth
    return width, min(width - 1, deepest)


def _empty_plan(
    num_rows: int, num_elements: int, width: int, max_depth: int, device: torch.device
) -> VerifyPlan:
    row = torch.zeros(num_rows, dtype=torch.int64, device=device)
    table = torch.empty(0, width, dtype=torch.int64, device=device)
    return VerifyPlan(
        input_ids=row,
        positions=row.clone(),
        qo_indptr=torch.zeros(1, dtype=torch.int32, device=device),
        node_ids=torch.full_like(row, -1),
        retrieve_index=table,
        retrieve_next_token=table.clone(),
        retrieve_next_sibling=table.clone(),
        retrieve_parent=table.clone(),
        tree_mask=torch.zeros(num_elements, dtype=torch.bool, device=device),
        prefix_lens=torch.empty(0, dtype=torch.int64, device=device),
        max_depth=max_depth,
    )


def check_plan_values_host(
    trees: DraftTrees,
    allocation: Allocation,
    prefix_lens: torch.Tensor,
    depth: torch.Tensor,
) -> None:
    """Raise ValueError unless the arguments of a plan fit each other; reads values."""
    negative = prefix_lens < 0
    if negative.any():
        row = int(negative.nonzero()[0, 0])
        raise ValueError(
            f"prefix_lens must be at least 0, got {int(prefix_lens[row])} at [{row}]"
        )
    allocation.validate()
    keep = allocation.keep
    padding = keep & ~trees.is_node()
    if padding.any():
        where = padding.nonzero()[0].tolist()
        raise ValueError(
            f"allocation.keep must be False at padding, got True at {where}"
        )
    parent_kept = keep.gather(1, trees.parents.clamp(0, max(trees.max_nodes - 1, 0)))
    orphan = keep & (trees.parents >= 0) & ~parent_kept
    if orphan.any():
        where = orphan.nonzero()[0].tolist()
        raise ValueError(
            "allocation.keep must be closed under parents, got True at "
            f"{where} and False at its parent"
        )
    if trees.max_depth is not None:
        too_deep = keep & (depth > trees.max_depth)
        if too_deep.any():
            where = too_deep.nonzero()[0].tolist()
            raise ValueError(
                f"max_depth must bound every node's depth, got {trees.max_depth} "
                f"with a deeper node at {where}"
            )


def check_bound_host(name: str, bound: int, needed: int) -> None:
    """Raise ValueError if a host bound is below what the batch needs."""
    if bound < needed:
        raise ValueError(f"{name} must be at least {needed} here, got {bound}")


def _exact_sizes_host(
    allocation: Allocation, depth: torch.Tensor
) -> tuple[int, int, int, int]:
    if allocation.keep.shape[0] == 0:
        return 0, 0, 1, 0
    lens = allocation.verify_lens.to(torch.int64)
    # A column of zeros keeps the maximum defined where there are no nodes.
    kept_depth = torch.nn.functional.pad(depth * allocation.keep, (1, 0))
    sizes = torch.stack([lens.sum(), (lens * lens).sum(), lens.max(), kept_depth.max()])
    num_rows, num_elements, width, max_depth = sizes.tolist()
    return num_rows, num_elements, width, max_depth


def _links_torch(parent_at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First child and next sibling, `[bs, W]` places, from each place's parent.

    Sorted by parent, siblings stand next to each other, ascending; the first of each
    group is its parent's first child.
    """
    bs, width = parent_at.shape
    order = parent_at.argsort(dim=1, stable=True)
    parent = parent_at.gather(1, order)
    same = (parent[:, 1:] == parent[:, :-1]) & (parent[:, 1:] >= 0)
    sibling = torch.where(same, order[:, 1:], -1)
    next_sibling = torch.full_like(parent_at, -1)
    next_sibling.scatter_(1, order[:, :-1], sibling)
    first = torch.nn.functional.pad(~same, (1, 0), value=True) & (parent >= 0)
    # Places that are nobody's first child write to a spare last column.
    next_token = parent_at.new_full((bs, width + 1), -1)
    next_token.scatter_(1, torch.where(first, parent, width), order)
    return next_token[:, :width].contiguous(), next_sibling
