"""Compiled loops of survival and selection.

What they compute is defined in core.survival and core.allocator. Selection needs no
sort: each node gets a 63-bit key, weighted survival above, shallowness below; radix
selection finds the budget-th largest key in time linear in the number of nodes; nodes
above it are kept, and of those equal to it the first in flat order, which is by request
and then by node.
"""

import numpy as np
import numpy.typing as npt

from sglang_tetris.core.jit import compiled

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]

# Depths stay below 2^32: the lower half of a key.
_DEEPEST = 2**32 - 1
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

    1 <= rank <= count, keys >= 0. Nine digits of seven bits, from the top; only the
    keys that agree so far are looked at again. Overwrites the range and the counters.
    """
    shift = 56
    while True:
        histogram[:] = 0
        for i in range(begin, begin + count):
            histogram[(keys[i] >> shift) & 127] += 1
        digit = 127
        while rank > histogram[digit]:
            rank -= histogram[digit]
            digit -= 1
        if histogram[digit] < count:
            end = begin
            for i in range(begin, begin + count):
                if (keys[i] >> shift) & 127 == digit:
                    keys[end] = keys[i]
                    end += 1
            count = histogram[digit]
        if shift == 0 or count == 1:
            return keys[begin], rank
        shift -= 7


@compiled(
    "void(i8[:,::1], f4[:,::1], i8[::1], f4[::1], i8[::1], i8, "
    "b1[:,::1], i4[::1], f4[::1])"
)
def fill_selection(
    parents: Ints,
    probs: Floats,
    num_nodes: Ints,
    weights: Floats,
    caps: Ints,
    budget: int,
    keep: Bools,
    verify_lens: Ints32,
    expected: Floats,
) -> None:
    """Fill the last three arguments; empty `weights` or `caps` stand for none."""
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
            keys[request, node] = (np.int64(bits[node]) << 32) | (_DEEPEST - depth)
        if caps.size > 0 and caps[request] < count:
            cut, spare = _LARGEST_KEY, 0
            if caps[request] > 0:
                pool[available : available + count] = keys[request, :count]
                cut, spare = kth_largest(
                    pool, available, count, caps[request], histogram
                )
            for node in range(count):
                key = keys[request, node]
                if key == cut and spare > 0:
                    spare -= 1
                elif key <= cut:
                    keys[request, node] = -1
        for node in range(count):
            if keys[request, node] >= 0:
                pool[available] = keys[request, node]
                available += 1
    cut, spare = -1, 0
    if budget == 0:
        cut = _LARGEST_KEY
    elif budget < available:
        cut, spare = kth_largest(pool, 0, available, budget, histogram)
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
