"""Survival of draft nodes, and their depth.

    survival(v) = accept_prob(v) * survival(parent(v)),  survival(anchor) = 1

The product is taken in float32 from the anchor downwards, on every backend. A factor in
[0, 1] cannot make a rounded product grow, so survival never grows along a path, and
equal inputs give equal bits: the allocator's ties depend on both.
"""

import torch

from sglang_tetris.core.backend import loops_for
from sglang_tetris.core.errors import on_plain_cpu
from sglang_tetris.core.types import DraftTrees


def path_survival(trees: DraftTrees) -> torch.Tensor:
    """Return the probability that a node and all its ancestors are accepted.

    `[bs, max_nodes]` float32 in [0, 1], 0 at padding. No wait on an accelerator.
    """
    loops = loops_for(trees.tokens)
    if loops is not None:
        survival: torch.Tensor = loops.path_survival(trees)
        return survival
    return path_survival_torch(trees)


def path_survival_torch(trees: DraftTrees) -> torch.Tensor:
    """`path_survival` in torch operations, on any device."""
    node = trees.is_node()
    probs = torch.where(node, trees.accept_probs, 0.0)
    # Column 0 is the anchor, so that a parent's column is its index + 1.
    parent_column = torch.where(node, trees.parents, -1) + 1
    survival = probs.new_ones(trees.batch_size, trees.max_nodes + 1)
    for _ in range(_num_levels(trees)):
        # Each round settles one more level; settled ones are computed again, alike.
        survival[:, 1:] = probs * survival.gather(1, parent_column)
    return survival[:, 1:].clone()


def node_depths_torch(trees: DraftTrees) -> torch.Tensor:
    """Return `[bs, max_nodes]` int64, 1 = child of the anchor; 1 at padding.

    By doubling: after k rounds a node has counted 2^k steps towards the anchor.
    """
    parent_column = torch.where(trees.is_node(), trees.parents, -1) + 1
    jump = torch.nn.functional.pad(parent_column, (1, 0))
    depth = torch.nn.functional.pad(torch.ones_like(parent_column), (1, 0))
    for _ in range(trees.max_nodes.bit_length()):
        depth = depth + depth.gather(1, jump)
        jump = jump.gather(1, jump)
    return depth[:, 1:]


def _num_levels(trees: DraftTrees) -> int:
    if trees.max_depth is not None:
        return min(trees.max_depth, trees.max_nodes)
    if on_plain_cpu(trees.tokens) and trees.tokens.numel():
        return int(node_depths_torch(trees).max())
    return trees.max_nodes
