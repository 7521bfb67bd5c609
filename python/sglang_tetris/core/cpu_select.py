"""Compiled loops of survival and selection.

What they compute is defined in core.survival and core.allocator. Selection needs no
sort: each node gets a 63-bit key, the floor on top, weighted survival below it, then
shallowness; radix selection finds the budget-th largest key in time linear in the
number of nodes; nodes above it are kept, and of those equal to it the first in flat
order, which is by request and then by node. A row's caps and floors are found alike.
"""

import numpy as np
import numpy.typing as npt

from sglang_tetris.core.jit import compiled

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]

# core.allocator's key. Constants of this file, since numba's cache follows only it.
_DEEPEST = 2**31 - 1
_FLOOR_BIT = 1 << 62
# Above every key: no depth is 0.
_LARGEST_KEY = 2**63 - 1


@compiled("void(i8[:,::1], f4[:,::1], i8[::1], f4[:,::1])")
def fill_survival(
    parents: Ints, probs: Floats, num_nodes: Ints, survival: Floats
) -> None:
    for request in range(parents.shape[0]):
        for node in range(num_nodes[request]):
            parent = parents[request, node]
            value = probs[request, node]
            if parent >= 0:
                value = value * survival[request, parent]
            survival[request, node] = value
        survival[request, num_nodes[request] :] = 0


@compiled("UniTuple(i8, 2)(i8[::1], i8, i8, i8, i8[::1])")
def kth_largest(
    keys: Ints, begin: int, count: int, rank: int, histogram: Ints
) -> tuple[int, int]:
    """The rank-th largest of keys[begin : begin + count], and its rank among equals.

    1 <= rank <= count, keys >= 0. Digits of seven bits, each from the highest bit in
    which the keys that agree so far differ: two or three passes, where the keys' own
    digits would take nine. Overwrites the range and the counters.
    """
    shift = 56
    while True:
        first = keys[begin]
        difference = 0
        for i in range(begin, begin + count):
            difference |= keys[i] ^ first
        if difference == 0:
            return first, rank
        while shift > 0 and difference >> (shift + 6) == 0:
            shift -= 1
        histogram[:] = 0
        for i in range(begin, begin + count):
            histogram[(keys[i] >> shift) & 127] += 1
        digit = 127
        while rank > histogram[digit]:
            rank -= histogram[digit]
            digit -= 1
        end = begin
        for i in range(begin, begin + count):
            if (keys[i] >> shift) & 127 == digit:
                keys[end] = keys[i]
                end += 1
        count = end - begin


@compiled("UniTuple(i8, 2)(i8[::1], i8, i8, i8, i8[::1])")
def cut_at(
    pool: Ints, begin: int, count: int, rank: int, histogram: Ints
) -> tuple[int, int]:
    """`kth_largest` for any rank >= 0: a key that just the first `rank` keys exceed or,
    as often as the second value says, equal."""
    if rank == 0:
        return _LARGEST_KEY, 0
    if rank >= count:
        return -1, 0
    return kth_largest(pool, begin, count, rank, histogram)


@compiled("void(i8[::1], i8, i8, i8, i8[::1], i8, i8[::1])")
def limit_row(
    keys: Ints, count: int, cap: int, floor: int, pool: Ints, free: int, histogram: Ints
) -> None:
    """Give floor nodes the floor's bit and nodes past the cap the key -1.

    Uses the pool from `free` on.
    """
    pool[free : free + count] = keys[:count]
    cap_cut, cap_spare = cut_at(pool, free, count, cap, histogram)
    floor_cut, floor_spare = cap_cut, cap_spare
    if floor < cap:
        pool[free : free + count] = keys[:count]
        floor_cut, floor_spare = cut_at(pool, free, count, floor, histogram)
    for node in range(count):
        key = keys[node]
        in_cap, in_floor = key > cap_cut, key > floor_cut
        if key == cap_cut and cap_spare > 0:
            cap_spare -= 1
            in_cap = True
        if key == floor_cut and floor_spare > 0:
            floor_spare -= 1
            in_floor = True
        if not in_cap:
            keys[node] = -1
        elif in_floor:
            keys[node] = key | _FLOOR_BIT


@compiled(
    "void(i8[:,::1], f4[:,::1], i8[::1], f4[::1], i8[::1], i8[::1], i8, "
    "b1[:,::1], i4[::1], f4[::1])"
)
def fill_selection(
    parents: Ints,
    probs: Floats,
    num_nodes: Ints,
    weights: Floats,
    caps: Ints,
    floors: Ints,
    budget: int,
    keep: Bools,
    verify_lens: Ints32,
    expected: Floats,
) -> None:
    """Fill the last three arguments; empty weights, caps or floors stand for none."""
    bs, max_nodes = parents.shape
    survival = np.empty((bs, max_nodes), np.float32)
    weighted = np.empty(max_nodes, np.float32)
    bits = weighted.view(np.int32)
    depths = np.empty(max_nodes, np.int64)
    keys = np.empty((bs, max_nodes), np.int64)
    pool = np.empty(bs * max_nodes, np.int64)
    histogram = np.empty(128, np.int64)
    available = 0
    for request in range(bs):
        count = num_nodes[request]
        for node in range(count):
            parent = parents[request, node]
            value = probs[request, node]
            depth = 1
            if parent >= 0:
                value = value * survival[request, parent]
                depth = depths[parent] + 1
            survival[request, node] = value
            depths[node] = depth
            if weights.size > 0:
                value = value * weights[request]
            # The bits of non-negative floats order like the floats; + 0 clears -0.
            weighted[node] = value + np.float32(0)
            keys[request, node] = (np.int64(bits[node]) << 31) | (_DEEPEST - depth)
        cap = min(caps[request], count) if caps.size > 0 else count
        floor = min(floors[request], cap) if floors.size > 0 else 0
        if cap < count or floor > 0:
            limit_row(keys[request], count, cap, floor, pool, available, histogram)
        for node in range(count):
            if keys[request, node] >= 0:
                pool[available] = keys[request, node]
                available += 1
    cut, spare = cut_at(pool, 0, available, budget, histogram)
    for request in range(bs):
        length = 1
        total = 0.0
        for node in range(num_nodes[request]):
            key = keys[request, node]
            chosen = key > cut
            if key == cut and spare > 0:
                spare -= 1
                chosen = True
            keep[request, node] = chosen
            if chosen:
                length += 1
                total += survival[request, node]
        keep[request, num_nodes[request] :] = False
        verify_lens[request] = length
        expected[request] = total
