"""What one request emits in a round, as exact probabilities of the core's answers.

By `verify_chains`: the cube of a chain's coins is cut where the plain reference says
that the outcome changes; the function is asked next to both ends of every cell and must
say what the reference says, so the volumes of the cells are the probabilities of its
answers. By `match_tree`: it is asked for every choice of a token by the target at every
row. All in float64.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from sglang_tetris.core import (
    DraftTrees,
    VerifyPlan,
    build_verify_plan,
    match_tree,
    select_draft_tokens,
    verify_chains,
)
from tests.reference import rejection
from tests.reference.worlds import VOCAB, World

DEPTH = 2
CHAIN = (-1, 0)
# Distance from the end of a cell at which the function is asked.
_INSIDE = 1e-13
# A narrower cell is the rounding of an empty one.
_NOTHING = 1e-14

# Mass of every emitted text of 1, 2 and 3 tokens: [..., 3], [..., 3, 3], ...
Emitted = list[np.ndarray]


class Cell(NamedTuple):
    """A box of coins in which the same text is emitted."""

    world: int
    drafts: tuple[int, ...]
    text: tuple[int, ...]
    mass: float
    low: list[float]
    high: list[float]


def forest_of(
    tokens: np.ndarray, values: np.ndarray, parents: Sequence[int] = CHAIN
) -> DraftTrees:
    """Trees of one shape, `[bs, nodes]` tokens and values."""
    return DraftTrees(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        parents=torch.tensor(list(parents), dtype=torch.int64).repeat(len(tokens), 1),
        accept_probs=torch.tensor(values, dtype=torch.float32),
        num_nodes=torch.full((len(tokens),), len(parents)),
    )


def continued(emitted: Emitted, world: World) -> np.ndarray:
    """Law of three tokens, [..., 27], the target continuing what was emitted."""
    one, two, three = emitted
    after_one = world.p[1][..., None] * world.p[2]
    whole = one[..., None, None] * after_one + two[..., None] * world.p[2] + three
    return whole.reshape(*whole.shape[:-3], VOCAB**3)


def mean_correct(emitted: Emitted) -> np.ndarray:
    """Expected correct drafts, [...]."""
    _, two, three = emitted
    return two.sum((-1, -2)) + 2 * three.sum((-1, -2, -3))


def by_chains(worlds: list[World], rule: str) -> list[Emitted]:
    """What `verify_chains` emits, per world, leading axes [n, draw].

    n drafts are verified; a draw is a pair of drafts, the second one fastest. Draws
    that the draft cannot make have no mass.
    """
    cells = [
        cell
        for number, world in enumerate(worlds)
        for n in range(DEPTH + 1)
        for drafts in product(range(VOCAB), repeat=n)
        for cell in _cells(number, world, rule, drafts)
    ]
    for corner in ("low", "high"):
        got = _verify(worlds, rule, cells, corner)
        for cell, tokens in zip(cells, got, strict=True):
            assert tuple(t for t in tokens if t >= 0) == cell.text, (corner, cell)
    out = [_no_mass(DEPTH + 1, VOCAB, VOCAB) for _ in worlds]
    for cell in cells:
        # A draft that is not verified may be any token.
        draws = (*cell.drafts, *[slice(None)] * (DEPTH - len(cell.drafts)))
        masses = out[cell.world][len(cell.text) - 1]
        masses[(len(cell.drafts), *draws, *cell.text)] += cell.mass
    return [
        [m.reshape(DEPTH + 1, VOCAB**DEPTH, *m.shape[3:]) for m in masses]
        for masses in out
    ]


def _cells(
    number: int, world: World, rule: str, drafts: tuple[int, ...]
) -> Iterator[Cell]:
    """Cut the cube of DEPTH coins and the final uniform."""
    p = [world.p[j][drafts[:j]].tolist() for j in range(len(drafts) + 1)]
    q = [world.q[j][drafts[:j]].tolist() for j in range(len(drafts))]
    if any(law[token] == 0 for law, token in zip(q, drafts, strict=True)):
        return
    chances = rejection.coin_chances(rule, p, q, drafts)
    for falls, chance, correct, final in rejection.outcomes(rule, p, q, drafts):
        sides = [
            (0.0, edge) if fell else (edge, 1.0)
            for fell, edge in zip(falls, chances, strict=True)
        ]
        sides += [(0.0, 1.0)] * (DEPTH - len(drafts))
        edge = 0.0
        for token in range(VOCAB):
            box = [*sides, (edge, edge + final[token])]
            edge += final[token]
            if min(high - low for low, high in box) < _NOTHING:
                continue
            margins = [min(_INSIDE, (high - low) / 4) for low, high in box]
            ends = list(zip(box, margins, strict=True))
            yield Cell(
                world=number,
                drafts=drafts,
                text=(*drafts[:correct], token),
                mass=chance * final[token],
                # 0 itself is a coin that can come up.
                low=[low + margin if low > 0 else 0.0 for (low, _), margin in ends],
                high=[high - margin for (_, high), margin in ends],
            )


def _verify(
    worlds: list[World], rule: str, cells: list[Cell], corner: str
) -> list[list[int]]:
    """The tokens that `verify_chains` emits at a corner of each cell, in one batch."""
    number = np.array([cell.world for cell in cells])
    n = np.array([len(cell.drafts) for cell in cells])
    drafts = np.array([(*cell.drafts, 0, 0)[:DEPTH] for cell in cells])
    coins = np.array([getattr(cell, corner) for cell in cells])
    x1, x2 = drafts.T
    p = [np.array([world.p[k] for world in worlds]) for k in range(DEPTH + 1)]
    q = [np.array([world.q[k] for world in worlds]) for k in range(DEPTH)]
    rows = np.stack([p[0][number], p[1][number, x1], p[2][number, x1, x2]], 1)
    laws = np.stack([q[0][number], q[1][number, x1]], 1)
    # The laws of drafts that are not verified may not matter.
    laws[np.arange(DEPTH) >= n[:, None]] = np.nan
    keep = np.arange(DEPTH) < n[:, None]
    result = verify_chains(
        plan_of(forest_of(drafts, np.ones(drafts.shape)), keep),
        target_probs=torch.from_numpy(rows[np.arange(DEPTH + 1) <= n[:, None]]),
        draft_probs=torch.from_numpy(laws),
        uniforms=torch.from_numpy(coins[:, :DEPTH].copy()),
        uniforms_final=torch.from_numpy(coins[:, DEPTH].copy()),
        block=rule == "block",
    )
    return result.accept_tokens.tolist()


def plan_of(trees: DraftTrees, keep: np.ndarray) -> VerifyPlan:
    """The plan of trees of which just the nodes in `keep` are verified."""
    everything = select_draft_tokens(trees, draft_budget=0)
    lens = torch.from_numpy(keep.sum(1).astype(np.int32)) + 1
    zeros = torch.zeros(len(keep), dtype=torch.int64)
    allocation = replace(everything, keep=torch.from_numpy(keep), verify_lens=lens)
    return build_verify_plan(trees, allocation, anchors=zeros, prefix_lens=zeros)


def by_match(
    world: World, parents: Sequence[int], draws: np.ndarray, keeps: np.ndarray
) -> Emitted:
    """What `match_tree` emits, leading axes [keep, draw].

    parents of a tree's N nodes; draws [M, N] their tokens; keeps [K, N] bool, sets of
    nodes that are verified.
    """
    out = _no_mass(len(keeps), len(draws))
    for number, keep in enumerate(keeps):
        nodes = keep.nonzero()[0]
        chosen = np.array(list(product(range(VOCAB), repeat=len(nodes) + 1)))
        draw = np.arange(len(draws)).repeat(len(chosen))
        chosen = np.tile(chosen, (len(draws), 1))
        mass = world.p[0][chosen[:, 0]]
        for row, node in enumerate(nodes, start=1):
            path = _path(parents, node)
            law = world.p[len(path)][tuple(draws[:, path].T)]
            mass = mass * law[draw, chosen[:, row]]
        trees = forest_of(draws[draw], np.ones((len(draw), len(parents))), parents)
        plan = plan_of(trees, np.tile(keep, (len(draw), 1)))
        result = match_tree(plan, torch.from_numpy(chosen.flatten()))
        tokens = result.accept_tokens.numpy()
        for length in np.unique(result.accept_lens.numpy()):
            here = result.accept_lens.numpy() == length
            place = (number, draw[here], *tokens[here, :length].T)
            np.add.at(out[length - 1], place, mass[here])
    return out


def _path(parents: Sequence[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def _no_mass(*axes: int) -> Emitted:
    return [np.zeros(axes + (VOCAB,) * length) for length in (1, 2, 3)]
