"""`build_verify_plan` in Triton: one program a request, no scratch memory.

A program adds up the lengths ahead of its own to find where its rows and its block of
the mask begin: 512 lengths are 2 KiB, read sooner than a second kernel starts. It then
holds its tree in registers and writes rows, links and mask from there. Padding is laid
down beforehand. The grid is the number of requests; with both host bounds given,
nothing waits and every size follows from shapes and bounds.
"""

import torch
import triton
import triton.language as tl

from sglang_tetris.core import Allocation, DraftTrees, VerifyPlan
from sglang_tetris.core.layout import checked_plan, plan_sizes
from sglang_tetris.kernels.tree_rows import launch_shape, load_parents, node_depths

# Lengths that a program adds up at a time.
LENS_CHUNK = 1024


def build_verify_plan(
    trees: DraftTrees,
    allocation: Allocation,
    *,
    anchors: torch.Tensor,
    prefix_lens: torch.Tensor,
    total_verify_tokens: int | None = None,
    num_mask_elements: int | None = None,
) -> VerifyPlan:
    """`core.build_verify_plan` on a GPU, with the same rows, links and masks."""
    anchors, prefix_lens = checked_plan(
        trees, allocation, anchors, prefix_lens, total_verify_tokens, num_mask_elements
    )
    num_rows, num_elements, width, max_depth = plan_sizes(
        trees, allocation, total_verify_tokens, num_mask_elements
    )
    bs, device = trees.batch_size, trees.tokens.device
    ints = {"dtype": torch.int64, "device": device}
    plan = VerifyPlan(
        input_ids=torch.zeros(num_rows, **ints),
        positions=torch.zeros(num_rows, **ints),
        qo_indptr=torch.zeros(bs + 1, dtype=torch.int32, device=device),
        node_ids=torch.full((num_rows,), -1, **ints),
        retrieve_index=torch.empty(bs, width, **ints),
        retrieve_next_token=torch.empty(bs, width, **ints),
        retrieve_next_sibling=torch.empty(bs, width, **ints),
        retrieve_parent=torch.empty(bs, width, **ints),
        tree_mask=torch.zeros(num_elements, dtype=torch.bool, device=device),
        prefix_lens=prefix_lens,
        max_depth=max_depth,
    )
    if bs == 0:
        return plan
    with torch.cuda.device_of(plan.input_ids):
        _plan_kernel[(bs,)](
            trees.tokens.contiguous(),
            trees.parents.contiguous(),
            trees.num_nodes.contiguous(),
            allocation.keep.contiguous(),
            allocation.verify_lens.contiguous(),
            anchors.contiguous(),
            prefix_lens.contiguous(),
            plan.input_ids,
            plan.positions,
            plan.qo_indptr,
            plan.node_ids,
            plan.retrieve_index,
            plan.retrieve_next_token,
            plan.retrieve_next_sibling,
            plan.retrieve_parent,
            plan.tree_mask,
            trees.max_nodes,
            width,
            num_rows,
            num_elements,
            CHUNK=LENS_CHUNK,
            # Of the widest table there can be: one kernel for every width.
            WIDTH_BLOCK=triton.next_power_of_2(trees.max_nodes + 1),
            **launch_shape(trees.max_nodes),
        )
    return plan


@triton.jit
def _begins(verify_lens_ref, request, CHUNK: tl.constexpr):
    """Return how many rows and mask elements the requests ahead have."""
    first_row = tl.full((), 0, tl.int64)
    first_element = tl.full((), 0, tl.int64)
    for begin in range(0, request, CHUNK):
        other = begin + tl.arange(0, CHUNK)
        lens = tl.load(verify_lens_ref + other, mask=other < request, other=0)
        lens = lens.to(tl.int64)
        first_row += tl.sum(lens, 0)
        first_element += tl.sum(lens * lens, 0)
    return first_row, first_element


@triton.jit(do_not_specialize=["max_nodes", "width", "num_rows", "num_elements"])
def _plan_kernel(
    tokens_ref,
    parents_ref,
    num_nodes_ref,
    keep_ref,
    verify_lens_ref,
    anchors_ref,
    prefix_lens_ref,
    input_ids_ref,
    positions_ref,
    qo_indptr_ref,
    node_ids_ref,
    index_ref,
    next_token_ref,
    next_sibling_ref,
    parent_ref,
    mask_ref,
    max_nodes,
    width,
    num_rows,
    num_elements,
    CHUNK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the rows, links and mask block of one request.

    Rows, places and elements past a bound that is too low are left out.
    """
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(verify_lens_ref + request)
    first_row, first_element = _begins(verify_lens_ref, request, CHUNK)
    tl.store(qo_indptr_ref + request + 1, first_row + length)

    is_node, parents = load_parents(
        parents_ref, num_nodes_ref, request, max_nodes, BLOCK
    )
    node = tl.arange(0, BLOCK)
    at = request * max_nodes + node
    kept = tl.load(keep_ref + at, mask=is_node, other=0) != 0
    depths = node_depths(parents, BLOCK)
    # The anchor's place is 0, so the running count is the place of a kept node.
    places = tl.cumsum(kept.to(tl.int32), 0)

    prefix_len = tl.load(prefix_lens_ref + request)
    row = first_row + places
    tokens = tl.load(tokens_ref + at, mask=kept, other=0)
    tl.store(input_ids_ref + row, tokens, mask=kept & (row < num_rows))
    tl.store(positions_ref + row, prefix_len + depths, mask=kept & (row < num_rows))
    tl.store(node_ids_ref + row, node, mask=kept & (row < num_rows))
    has_row = first_row < num_rows
    anchor = tl.load(anchors_ref + request)
    tl.store(input_ids_ref + first_row, anchor, mask=has_row)
    tl.store(positions_ref + first_row, prefix_len, mask=has_row)

    table = request * width
    column = tl.arange(0, WIDTH_BLOCK)
    empty = (column >= length) & (column < width)
    index = tl.where(empty, -1, first_row + column)
    tl.store(index_ref + table + column, index, mask=column < width)
    tl.store(next_token_ref + table + column, -1, mask=empty)
    tl.store(next_sibling_ref + table + column, -1, mask=empty)
    tl.store(parent_ref + table + column, -1, mask=empty)
    none = BLOCK + 1
    first_child = tl.min(tl.where(kept & (parents < 0), places, none), 0)
    tl.store(next_token_ref + table, tl.where(first_child < none, first_child, -1))
    tl.store(next_sibling_ref + table, -1)
    tl.store(parent_ref + table, -1)
    tl.store(mask_ref + first_element, True, mask=first_element < num_elements)

    num_levels = tl.max(tl.where(kept, depths, 0), 0)
    for begin in range(0, BLOCK, TILE):
        own = begin + tl.arange(0, TILE)
        own_parent = tl.gather(parents, own, 0)
        own_place = tl.gather(places, own, 0)
        own_kept = tl.gather(kept.to(tl.int32), own, 0) != 0
        parent_place = tl.gather(places, tl.maximum(own_parent, 0), 0)
        parent_place = tl.where(own_parent >= 0, parent_place, 0)

        later = kept[None, :] & (node[None, :] > own[:, None])
        child = later & (parents[None, :] == own[:, None])
        sibling = later & (parents[None, :] == own_parent[:, None])
        next_token = tl.min(tl.where(child, places[None, :], none), 1)
        next_sibling = tl.min(tl.where(sibling, places[None, :], none), 1)
        written = own_kept & (own_place < width)
        cell = table + own_place
        tl.store(parent_ref + cell, parent_place, mask=written)
        next_token = tl.where(next_token < none, next_token, -1)
        tl.store(next_token_ref + cell, next_token, mask=written)
        next_sibling = tl.where(next_sibling < none, next_sibling, -1)
        tl.store(next_sibling_ref + cell, next_sibling, mask=written)

        attend = node[None, :] == own[:, None]
        ancestor = own
        for _ in range(1, num_levels):
            above = tl.gather(parents, tl.maximum(ancestor, 0), 0)
            ancestor = tl.where(ancestor >= 0, above, -1)
            attend |= node[None, :] == ancestor[:, None]
        line = first_element + own_place.to(tl.int64) * length
        tl.store(mask_ref + line, True, mask=own_kept & (line < num_elements))
        element = line[:, None] + places[None, :]
        inside = own_kept[:, None] & kept[None, :] & (element < num_elements)
        tl.store(mask_ref + element, attend, mask=inside)
