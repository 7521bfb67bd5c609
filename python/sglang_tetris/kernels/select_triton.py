"""`select_draft_tokens` in Triton: three launches, whatever the values.

    1. a program a request: survival, depth, 63-bit sort key (core.allocator), caps and
       floors by each node's rank in its row;
    2. one program: the budget-th largest key of the batch, nine bits a pass, seven
       passes over the keys; then the nodes above it, and of those equal to it the
       first in flat order, are kept;
    3. a program a request: its length and its expectation.

Why one program in 2: a pass depends on the one before, and between programs only a
launch orders them, so many programs would need nine launches. 512 requests of 63 nodes
are 252 KiB of keys, which stay in the cache while one multiprocessor reads them eight
times; a usual batch has a tenth of that. (A judgement from these sizes: no GPU has
timed the two against each other.)

The grid follows from the shapes; budget, caps, floors and weights are read on the
device. So a captured graph can be replayed with other values in the same tensors.
"""

import torch
import triton
import triton.language as tl

from sglang_tetris.core import Allocation, DraftTrees
from sglang_tetris.core.allocator import Count, checked_selection
from sglang_tetris.kernels.tree_rows import (
    launch_shape,
    load_parents,
    node_depths,
    row_survival,
)

# core.allocator's key.
_DEEPEST = tl.constexpr(2**31 - 1)
_FLOOR_BIT = tl.constexpr(1 << 62)
_NUM_DIGITS = tl.constexpr(7)
_DIGIT_BITS = tl.constexpr(9)
_NUM_BINS = tl.constexpr(1 << 9)
# Keys that the single program looks at in one go, eight a thread. The same for every
# batch: a second size would have to be compiled while requests wait.
CHUNK = 4096
CHUNK_WARPS = 16


def select_draft_tokens(
    trees: DraftTrees,
    *,
    draft_budget: Count,
    max_drafts: Count | None = None,
    weights: torch.Tensor | None = None,
    min_drafts: Count | None = None,
) -> Allocation:
    """`core.select_draft_tokens` on a GPU, keeping the very same nodes."""
    return select_draft_tokens_triton(
        trees, *checked_selection(trees, draft_budget, max_drafts, weights, min_drafts)
    )


def select_draft_tokens_triton(
    trees: DraftTrees,
    draft_budget: Count,
    max_drafts: Count | None,
    weights: torch.Tensor | None,
    min_drafts: Count | None,
) -> Allocation:
    """`select_draft_tokens` with checked arguments."""
    bs, max_nodes = trees.tokens.shape
    device = trees.tokens.device
    keep = torch.empty(bs, max_nodes, dtype=torch.bool, device=device)
    if keep.numel() == 0:
        return Allocation(
            keep=keep,
            verify_lens=torch.ones(bs, dtype=torch.int32, device=device),
            expected_correct_drafts=torch.zeros(bs, device=device),
        )
    verify_lens = torch.empty(bs, dtype=torch.int32, device=device)
    expected = torch.empty(bs, dtype=torch.float32, device=device)
    survival = torch.empty(bs, max_nodes, dtype=torch.float32, device=device)
    keys = torch.empty(bs, max_nodes, dtype=torch.int64, device=device)
    shape = launch_shape(max_nodes)
    with torch.cuda.device_of(keys):
        _key_kernel[(bs,)](
            trees.parents.contiguous(),
            trees.accept_probs.contiguous(),
            trees.num_nodes.contiguous(),
            None if weights is None else weights.contiguous(),
            _on_device(max_drafts, (bs,), device),
            _on_device(min_drafts, (bs,), device),
            survival,
            keys,
            max_nodes,
            **shape,
        )
        _admission_kernel[(1,)](
            keys,
            _on_device(draft_budget, (), device),
            keep,
            keys.numel(),
            CHUNK=CHUNK,
            num_warps=CHUNK_WARPS,
        )
        _total_kernel[(bs,)](keep, survival, verify_lens, expected, max_nodes, **shape)
    return Allocation(
        keep=keep, verify_lens=verify_lens, expected_correct_drafts=expected
    )


def _on_device(
    count: Count | None, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor | None:
    if count is None or isinstance(count, torch.Tensor):
        return None if count is None else count.contiguous()
    return torch.full(shape, count, dtype=torch.int64, device=device)


@triton.jit(do_not_specialize=["max_nodes"])
def _key_kernel(
    parents_ref,
    probs_ref,
    num_nodes_ref,
    weights_ref,
    caps_ref,
    floors_ref,
    survival_ref,
    keys_ref,
    max_nodes,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Fill a row of survival and keys; a key is -1 at padding and past the cap."""
    request = tl.program_id(0).to(tl.int64)
    is_node, parents = load_parents(
        parents_ref, num_nodes_ref, request, max_nodes, BLOCK
    )
    place = tl.arange(0, BLOCK)
    at = request * max_nodes + place
    probs = tl.load(probs_ref + at, mask=is_node, other=0.0)
    depths = node_depths(parents, BLOCK)
    survival = row_survival(parents, probs, tl.max(depths, 0))
    tl.store(survival_ref + at, survival, mask=place < max_nodes)
    value = survival
    if weights_ref is not None:
        value = survival * tl.load(weights_ref + request)
    # The bits of non-negative floats order like the floats; -0.0 loses its sign.
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # All ones, less a number, are all ones but for its bits.
    keys = (bits.to(tl.int64) << 31) | (depths ^ _DEEPEST).to(tl.int64)
    keys = tl.where(is_node, keys, -1)
    if caps_ref is not None or floors_ref is not None:
        ranks = _ranks(keys, BLOCK, TILE)
        if floors_ref is not None:
            in_floor = is_node & (ranks < tl.load(floors_ref + request))
            keys = tl.where(in_floor, keys | _FLOOR_BIT, keys)
        if caps_ref is not None:
            keys = tl.where(ranks < tl.load(caps_ref + request), keys, -1)
    tl.store(keys_ref + at, keys, mask=place < max_nodes)


@triton.jit
def _ranks(keys, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return each key's number in descending order, the first of equals first."""
    place = tl.arange(0, BLOCK)
    ranks = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, BLOCK, TILE):
        other = begin + tl.arange(0, TILE)
        others = tl.gather(keys, other, 0)
        ahead = others[None, :] > keys[:, None]
        tied = others[None, :] == keys[:, None]
        ahead |= tied & (other[None, :] < place[:, None])
        ranks += tl.sum(ahead.to(tl.int32), 1)
    return ranks


@triton.jit(do_not_specialize=["num_keys"])
def _admission_kernel(keys_ref, budget_ref, keep_ref, num_keys, CHUNK: tl.constexpr):
    """Keep the `budget` largest keys >= 0, of equal ones the first."""
    place = tl.arange(0, CHUNK)
    bins = tl.arange(0, _NUM_BINS)
    # The cut's leading digits, and its rank among the keys that share them.
    cut = tl.full((), 0, tl.int64)
    rank = tl.load(budget_ref).to(tl.int64)
    for step in range(_NUM_DIGITS):
        shift = (_NUM_DIGITS - 1 - step) * _DIGIT_BITS
        counts = tl.zeros([_NUM_BINS], tl.int32)
        for begin in range(0, num_keys, CHUNK):
            at = begin + place
            keys = tl.load(keys_ref + at, mask=at < num_keys, other=-1)
            # In two steps, since all 63 bits are gone in the first pass; -1 stays -1.
            agrees = ((keys >> shift) >> _DIGIT_BITS) == cut
            digits = ((keys >> shift) & (_NUM_BINS - 1)).to(tl.int32)
            counts += tl.histogram(digits, _NUM_BINS, mask=agrees)
        # Only the first pass can find fewer. Rank 0 leads to a cut that no key reaches.
        rank = tl.minimum(tl.maximum(rank, 0), tl.sum(counts, 0))
        at_least = tl.cumsum(counts, 0, reverse=True)
        digit = tl.sum((at_least >= rank).to(tl.int32), 0) - 1
        rank -= tl.sum(tl.where(bins > digit, counts, 0), 0)
        cut = (cut << _DIGIT_BITS) | digit
    num_tied = tl.full((), 0, tl.int32)
    for begin in range(0, num_keys, CHUNK):
        at = begin + place
        keys = tl.load(keys_ref + at, mask=at < num_keys, other=-1)
        tied = (keys == cut).to(tl.int32)
        order = num_tied + tl.cumsum(tied, 0)
        kept = (keys > cut) | ((keys == cut) & (order <= rank))
        tl.store(keep_ref + at, kept, mask=at < num_keys)
        num_tied += tl.sum(tied, 0)


@triton.jit(do_not_specialize=["max_nodes"])
def _total_kernel(
    keep_ref,
    survival_ref,
    verify_lens_ref,
    expected_ref,
    max_nodes,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    at = request * max_nodes + place
    kept = tl.load(keep_ref + at, mask=place < max_nodes, other=0).to(tl.int32)
    survival = tl.load(survival_ref + at, mask=kept != 0, other=0.0)
    tl.store(verify_lens_ref + request, tl.sum(kept, 0) + 1)
    tl.store(expected_ref + request, tl.sum(survival.to(tl.float64), 0))
