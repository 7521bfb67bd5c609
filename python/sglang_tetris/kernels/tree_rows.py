"""What the kernels of all operations do with one request's tree, in registers.

A program holds a row of the trees as a block: the next power of two of max_nodes, at
least 16. Values on a device are not checked, so parents are forced below their node's
own index: whatever they hold, nothing is read outside the row and every loop ends.
"""

import triton
import triton.language as tl

# The most nodes that are compared with the whole row at a time, and pairs of nodes.
LONGEST_TILE = 32
_MOST_PAIRS = 2**15


def launch_shape(max_nodes: int) -> dict[str, int]:
    """Return block, tile and warps for rows of that many nodes."""
    block = max(triton.next_power_of_2(max_nodes), 16)
    return {
        "BLOCK": block,
        "TILE": min(block, LONGEST_TILE, max(_MOST_PAIRS // block, 1)),
        # A node a thread, within what the reductions over a row can use.
        "num_warps": min(max(block // 32, 1), 8),
    }


@triton.jit
def load_parents(parents_ref, num_nodes_ref, request, max_nodes, BLOCK: tl.constexpr):
    """Return the row's nodes and their parents, -1 = anchor; -1 at padding."""
    place = tl.arange(0, BLOCK)
    is_node = (place < tl.load(num_nodes_ref + request)) & (place < max_nodes)
    parents = tl.load(parents_ref + request * max_nodes + place, mask=is_node, other=-1)
    parents = tl.minimum(tl.maximum(parents, -1), place - 1)
    return is_node, parents.to(tl.int32)


@triton.jit
def node_depths(parents, BLOCK: tl.constexpr):
    """Return depths, 1 = child of the anchor, by doubling; 1 at padding.

    After k rounds a node has counted 2^k steps towards the anchor, or all there are.
    """
    depths = tl.full([BLOCK], 1, tl.int32)
    jump = parents
    while tl.max(jump, 0) >= 0:
        at = tl.maximum(jump, 0)
        depths += tl.where(jump >= 0, tl.gather(depths, at, 0), 0)
        jump = tl.where(jump >= 0, tl.gather(jump, at, 0), -1)
    return depths


@triton.jit
def row_survival(parents, probs, num_levels):
    """Return the product along the path; every round settles one more level."""
    survival = probs
    at = tl.maximum(parents, 0)
    for _ in range(1, num_levels):
        survival = probs * tl.where(parents >= 0, tl.gather(survival, at, 0), 1.0)
    return survival
