"""Compiled loops of what acceptance depends on; core.node_ranks and core.node_labels
define what they compute.
"""

import numpy as np
import numpy.typing as npt

from sglang_tetris.core import node_labels
from sglang_tetris.core.jit import compiled

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

fill_labels = compiled(
    "i8(i8[:,::1], i8[:,::1], i8[::1], i4[::1], i4[:,::1], b1[::1], i8[::1], b1[::1])"
)(node_labels.fill_labels)


@compiled("void(i8[:,::1], f4[:,::1], i8[::1], i8[:,::1], i8[:,::1])")
def fill_ranks(
    parents: Ints, probs: Floats, num_nodes: Ints, depths: Ints, ranks: Ints
) -> None:
    """Fill the last two arguments, padding included."""
    bs, max_nodes = parents.shape
    # By parent + 1, so that the anchor's children have a list too.
    last_child = np.empty(max_nodes + 1, np.int64)
    previous = np.empty(max_nodes, np.int64)
    for request in range(bs):
        count = num_nodes[request]
        last_child[: count + 1] = -1
        for node in range(count):
            parent = parents[request, node]
            depths[request, node] = 1 if parent < 0 else depths[request, parent] + 1
            prob = probs[request, node]
            rank = 0
            other = last_child[parent + 1]
            previous[node] = other
            last_child[parent + 1] = node
            while other >= 0:
                if prob > probs[request, other]:
                    ranks[request, other] += 1
                else:
                    rank += 1
                other = previous[other]
            ranks[request, node] = rank
        depths[request, count:] = 0
        ranks[request, count:] = 0
