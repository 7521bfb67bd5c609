"""Ranks, labels and fitted maps in plain loops, and labels to fit maps to."""

import numpy as np

from sglang_tetris.core import NUM_SAMPLING_CLASSES, DraftTrees
from sglang_tetris.core.calibration_map import MAX_CELL_DEPTH, MAX_CELL_RANK
from tests.reference.selection import depth

# One labelled node: probability, depth, rank, class, correct.
Label = tuple[float, int, int, int, bool]


def depths_and_ranks(trees: DraftTrees) -> tuple[list[list[int]], list[list[int]]]:
    depths, ranks = [], []
    for request, count in enumerate(trees.num_nodes.tolist()):
        parents = trees.parents[request].tolist()
        probs = trees.accept_probs[request].tolist()
        padding = [0] * (trees.max_nodes - count)
        depths.append([depth(parents, node) for node in range(count)] + padding)
        row = []
        for node in range(count):
            family = [n for n in range(count) if parents[n] == parents[node]]
            row.append(sorted(family, key=lambda n: (-probs[n], n)).index(node))
        ranks.append(row + padding)
    return depths, ranks


def labels(
    trees: DraftTrees, keep: list[list[bool]], target_tokens: list[int]
) -> list[tuple[int, int, bool]]:
    """Return (request, node, correct) of what a round says, by walking each tree."""
    found, begin = [], 0
    for request, row in enumerate(keep):
        parents = trees.parents[request].tolist()
        tokens = trees.tokens[request].tolist()
        kept = [node for node, is_kept in enumerate(row) if is_kept]
        chosen = dict(zip([-1, *kept], target_tokens[begin:], strict=False))
        begin += 1 + len(kept)
        compared, node = {}, -1
        while node is not None:
            following = None
            seen = set()
            for child in kept:
                if parents[child] == node and tokens[child] not in seen:
                    seen.add(tokens[child])
                    compared[child] = tokens[child] == chosen[node]
                    if compared[child]:
                        following = child
            node = following
        found += [(request, node, compared[node]) for node in sorted(compared)]
    return found


def isotonic(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the weighted isotonic regression, by its minimax formula."""
    size = len(values)
    total = np.concatenate([[0.0], (values * weights).cumsum()]).tolist()
    weight = np.concatenate([[0.0], weights.cumsum()]).tolist()

    def mean(i: int, j: int) -> float:
        return (total[j + 1] - total[i]) / (weight[j + 1] - weight[i])

    return np.array(
        [
            max(min(mean(i, j) for j in range(k, size)) for i in range(k + 1))
            for k in range(size)
        ]
    )


def maps(
    rounds: list[list[Label]],
    *,
    knots: np.ndarray,
    num_plain: int,
    cell_shape: tuple[int, int],
    half_life_rounds: float,
    prior_nodes: float,
) -> np.ndarray:
    """Return `[classes, depths, ranks, knots]` after all rounds, from scratch."""
    num_depths, num_ranks = cell_shape
    out = np.empty((2 * num_plain, *cell_shape, len(knots)))
    for group in range(2 * num_plain):
        own = [[one for one in one_round if one[3] == group] for one_round in rounds]
        own = [one_round for one_round in own if one_round]
        # Shares of every label at every knot: hat functions.
        sums = np.zeros((3, *cell_shape, len(knots)))
        for age, one_round in enumerate(reversed(own)):
            for prob, level, rank, _, correct in one_round:
                hats = [np.interp(prob, knots, row) for row in np.eye(len(knots))]
                share = np.array(hats) * 0.5 ** (age / half_life_rounds)
                cell = (min(level, num_depths) - 1, min(rank, num_ranks - 1))
                for total, part in zip(sums, (1, prob, correct), strict=True):
                    total[cell] += share * part
        nodes, probs, correct = sums
        prior = np.broadcast_to(knots, nodes.shape)
        if group >= num_plain:
            prior = out[group - num_plain]
        slope = np.divide(prior, knots, out=np.ones_like(nodes), where=knots > 0)
        expected, strength = probs * slope, prior_nodes * prior
        with np.errstate(invalid="ignore"):
            by_class = (correct.sum((0, 1)) + strength.mean((0, 1))) / (
                expected.sum((0, 1)) + strength.mean((0, 1))
            )
            by_rank = (correct.sum(0) + strength.mean(0) * by_class) / (
                expected.sum(0) + strength.mean(0)
            )
            factor = (correct + strength * by_rank) / (expected + strength)
        value = np.minimum(prior * factor, 1)
        value[..., 0] = 0
        for cell in np.ndindex(*cell_shape):
            out[group][cell] = isotonic(value[cell], nodes[cell] + prior_nodes)
    return out


def random_labels(rng: np.random.Generator, size: int) -> tuple[np.ndarray, ...]:
    """Return `Calibrator.update`'s arguments, of no law at all: the roughest maps."""
    return (
        rng.beta(0.5, 0.5, size),
        rng.integers(1, MAX_CELL_DEPTH + 3, size),
        rng.integers(0, MAX_CELL_RANK + 3, size),
        rng.integers(0, NUM_SAMPLING_CLASSES, size),
        rng.random(size) < 0.5,
    )
