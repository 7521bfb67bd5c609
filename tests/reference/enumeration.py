"""Every draw of a round of two requests, run through values, budget and allocator.

What is verified follows from the draws of both requests, by the real functions; what a
request then emits is given by `emitted`. The two together are the joint law of what
both requests write, exact but for rounding.
"""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import torch

from sglang_tetris.core import DraftBudget, path_survival, select_draft_tokens
from tests.reference.emitted import CHAIN, DEPTH, Emitted, continued, forest_of
from tests.reference.worlds import VOCAB, World

# Recorded laws [draws, D, V] and drawn tokens [draws, D] -> values [draws, D] float32.
ValueRule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

PAIRS = np.array(list(product(range(VOCAB), repeat=DEPTH)))


def draft_law(world: World) -> np.ndarray:
    """Probability of each pair of drafts, [9]."""
    return (world.q[0][:, None] * world.q[1]).flatten()


def chain_values(world: World, rule: ValueRule) -> np.ndarray:
    """The values of each pair of drafts, [9, DEPTH] float32, NaN if never drawn."""
    laws = np.stack([world.q[0][None].repeat(9, 0), world.q[1][PAIRS[:, 0]]], 1)
    values = rule(torch.from_numpy(laws), torch.from_numpy(PAIRS)).numpy()
    return np.where(draft_law(world)[:, None] > 0, values, np.float32(np.nan))


def kept(
    values: Sequence[np.ndarray],
    policy: DraftBudget,
    *,
    caps: list[int] | None = None,
    weights: list[float] | None = None,
    min_drafts: int | None = None,
    parents: Sequence[int] = CHAIN,
) -> np.ndarray:
    """Which nodes are verified, [draw, draw, request, node] bool.

    values of both requests' draws, [draws, nodes] each; a draw whose values are NaN is
    never made, and nothing is verified there.
    """
    first, second = values
    draws = np.argwhere(~np.logical_or.outer(*np.isnan(values).any(-1)))
    both = np.stack([first[draws[:, 0]], second[draws[:, 1]]], 1)
    flat = both.reshape(len(both), -1)
    distinct, which = np.unique(flat, axis=0, return_inverse=True)
    limits = {"caps": caps, "weights": weights, "min_drafts": min_drafts}
    found = [
        keep_of(row, policy, parents=parents, **limits)
        for row in distinct.reshape(-1, *both.shape[1:])
    ]
    keep = np.zeros((len(first), len(second), *both.shape[1:]), bool)
    keep[tuple(draws.T)] = np.array(found)[which.reshape(-1)]
    return keep


def keep_of(
    values: np.ndarray,
    policy: DraftBudget,
    *,
    caps: list[int] | None = None,
    weights: list[float] | None = None,
    min_drafts: int | None = None,
    parents: Sequence[int] = CHAIN,
) -> np.ndarray:
    """Which nodes are verified in one step, `[2, nodes]` bool, given their values."""
    trees = forest_of(np.zeros(values.shape), values, parents)
    budget = policy.draft_budget(
        survival=path_survival(trees), num_nodes=trees.num_nodes, total_kv_tokens=0
    )
    allocation = select_draft_tokens(
        trees,
        draft_budget=budget,
        max_drafts=None if caps is None else torch.tensor(caps),
        weights=None if weights is None else torch.tensor(weights),
        min_drafts=min_drafts,
    )
    return allocation.keep.numpy()


def joined(parts: Sequence[np.ndarray], choice: np.ndarray) -> np.ndarray:
    """Sum over both draws of the outer product of what each request makes of its own.

    parts of the requests, [choices, draws, outcomes] each; choice [draw, draw, request]
    says which of the choices is taken, -1 = leave this pair of draws out.
    """
    first, second = parts
    total = np.zeros((first.shape[-1], second.shape[-1]))
    for a, b in {tuple(pair) for pair in choice.reshape(-1, 2).tolist()}:
        if a >= 0:
            here = (choice == (a, b)).all(-1).astype(float)
            total += first[a].T @ here @ second[b]
    return total


def joint_law(
    pair: Sequence[World],
    laws: Sequence[np.ndarray],
    emitted: Sequence[Emitted],
    choice: np.ndarray,
) -> np.ndarray:
    """Joint law of three tokens of each request, [27, 27].

    laws of both requests' draws, [draws]; emitted with leading axes [choice, draw].
    """
    parts = [
        law[:, None] * continued(e, world)
        for world, law, e in zip(pair, laws, emitted, strict=True)
    ]
    return joined(parts, choice)


def target_law(pair: Sequence[World]) -> np.ndarray:
    """What both requests should write: independent, each by its target, [27, 27]."""
    first, second = (
        (w.p[0][:, None, None] * w.p[1][..., None] * w.p[2]).flatten() for w in pair
    )
    return np.multiply.outer(first, second)
