"""Random draft forests, and DraftTrees from plain lists."""

import numpy as np
import torch

from sglang_tetris.core import DraftTrees


def forest(
    rng: np.random.Generator, bs: int, max_nodes: int, levels: tuple[float, ...] = ()
) -> DraftTrees:
    """Return random trees: any shape, any number of nodes, garbage in the padding.

    With `levels`, probabilities are drawn from them, so that ties occur; without, from
    [0, 1), many of them next to 1, where rounding decides.
    """
    # Parents a few nodes back, so that deep trees are as common as wide ones.
    index = np.arange(max_nodes)
    parents = np.maximum(index - rng.integers(1, 4, (bs, max_nodes)), -1)
    wide = rng.integers(-1, np.maximum(index, 0), (bs, max_nodes))
    parents = np.where(rng.random((bs, 1)) < 0.5, parents, wide)
    if levels:
        probs = rng.choice(levels, (bs, max_nodes))
    else:
        near_one = 1 - rng.integers(0, 3, (bs, max_nodes)) * 2.0**-24
        probs = np.where(
            rng.random((bs, 1)) < 0.3, near_one, rng.random((bs, max_nodes))
        )
    num_nodes = rng.integers(0, max_nodes + 1, bs)
    padding = index >= num_nodes[:, None]
    return DraftTrees(
        tokens=torch.from_numpy(rng.integers(0, 4, (bs, max_nodes))),
        parents=torch.from_numpy(np.where(padding, 99, parents)),
        accept_probs=torch.from_numpy(np.where(padding, np.nan, probs)).float(),
        num_nodes=torch.from_numpy(num_nodes),
    )


def trees_of(
    *rows: list[tuple[int, int, float]], max_nodes: int | None = None
) -> DraftTrees:
    """Return the trees whose nodes are (token, parent, accept_prob)."""
    width = max([len(row) for row in rows] if max_nodes is None else [max_nodes])
    padded = [row + [(-7, 99, float("nan"))] * (width - len(row)) for row in rows]
    shape, ints = (len(rows), width), {"dtype": torch.int64}
    return DraftTrees(
        tokens=torch.tensor([[n[0] for n in row] for row in padded], **ints).view(
            shape
        ),
        parents=torch.tensor([[n[1] for n in row] for row in padded], **ints).view(
            shape
        ),
        accept_probs=torch.tensor([[n[2] for n in row] for row in padded]).view(shape),
        num_nodes=torch.tensor([len(row) for row in rows], **ints),
    )
