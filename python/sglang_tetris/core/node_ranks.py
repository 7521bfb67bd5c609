"""Where a node stands in its tree: its depth, and its rank among its siblings.

Siblings are ordered by the draft's probability, likelier first, the lower node first
among equals; rank 0 is the draft's first choice. Nodes that were trimmed count too.
"""

import torch

from sglang_tetris.core.backend import loops_for
from sglang_tetris.core.survival import node_depths_torch
from sglang_tetris.core.types import DraftTrees


def depths_and_ranks(trees: DraftTrees) -> tuple[torch.Tensor, torch.Tensor]:
    """Return depth (1 = child of the anchor) and rank of every node.

    Both `[bs, max_nodes]` int64, 0 at padding. `trees` must hold the draft's own
    probabilities: calibrated ones can order siblings differently. No wait on an
    accelerator.
    """
    loops = loops_for(trees.tokens)
    if loops is not None:
        found: tuple[torch.Tensor, torch.Tensor] = loops.depths_and_ranks(trees)
        return found
    return depths_and_ranks_torch(trees)


def depths_and_ranks_torch(trees: DraftTrees) -> tuple[torch.Tensor, torch.Tensor]:
    """`depths_and_ranks` in torch operations, on any device."""
    node = trees.is_node()
    depths = torch.where(node, node_depths_torch(trees), 0)
    # Padding poses as a child of the anchor that comes after every other.
    parent = torch.where(node, trees.parents, -1)
    prob = torch.where(node, trees.accept_probs, 0.0)
    index = torch.arange(trees.max_nodes, device=node.device)
    # [bs, node, other]: is the other one a sibling that comes first?
    sibling = parent[:, :, None] == parent[:, None, :]
    likelier = prob[:, None, :] > prob[:, :, None]
    equal = prob[:, None, :] == prob[:, :, None]
    first = likelier | (equal & (index < index[:, None]))
    return depths, torch.where(node, (sibling & first).sum(2), 0)
