"""Survival and selection in plain loops, and the optimum by exhaustive search."""

import itertools

import numpy as np

from sglang_tetris.core import DraftTrees


def survival(trees: DraftTrees) -> list[list[np.float32]]:
    rows = []
    for parents, probs, count in zip(
        trees.parents.tolist(),
        trees.accept_probs.numpy(),
        trees.num_nodes.tolist(),
        strict=True,
    ):
        row: list[np.float32] = []
        for node, parent in enumerate(parents[:count]):
            row.append(probs[node] * (row[parent] if parent >= 0 else np.float32(1)))
        rows.append(row + [np.float32(0)] * (len(parents) - count))
    return rows


def depth(parents: list[int], node: int) -> int:
    return 1 if parents[node] < 0 else 1 + depth(parents, parents[node])


def select(
    trees: DraftTrees,
    budget: int,
    caps: list[int] | None = None,
    weights: np.ndarray | None = None,
    floors: list[int] | None = None,
) -> list[list[bool]]:
    """Walk down the order that the contract states, taking what still fits."""
    values = survival(trees)
    order = []
    for request, count in enumerate(trees.num_nodes.tolist()):
        parents = trees.parents[request].tolist()
        row = []
        for node in range(count):
            value = values[request][node]
            if weights is not None:
                value = np.float32(value * weights[request])
            row.append((-value, depth(parents, node), request, node))
        floor = 0 if floors is None else floors[request]
        order += [(rank >= floor, *entry) for rank, entry in enumerate(sorted(row))]
    keep = [[False] * trees.max_nodes for _ in range(trees.batch_size)]
    left = budget
    for _past_floor, _value, _depth, request, node in sorted(order):
        full = caps is not None and sum(keep[request]) >= caps[request]
        if left > 0 and not full:
            keep[request][node] = True
            left -= 1
    return keep


def best_totals(
    trees: DraftTrees,
    caps: list[int] | None = None,
    weights: np.ndarray | None = None,
    floors: list[int] | None = None,
) -> list[float]:
    """Largest weighted total of any ancestor-closed set, by its number of nodes.

    Every ancestor-closed set of every request is looked at, no cleverness: a subset of
    nodes counts if it holds the parent of each of its nodes, and as many nodes as the
    floor wants or there are. Requests are then joined over all ways to split the number
    between them. A number that no such set has stands at -1.
    """
    best = [0.0]
    values = survival(trees)
    for request, count in enumerate(trees.num_nodes.tolist()):
        parents = trees.parents[request].tolist()
        weight = 1.0 if weights is None else float(weights[request])
        own: dict[int, float] = {}
        cap = count if caps is None else min(caps[request], count)
        floor = 0 if floors is None else min(floors[request], cap)
        for size in range(floor, cap + 1):
            for subset in itertools.combinations(range(count), size):
                if all(parents[n] < 0 or parents[n] in subset for n in subset):
                    total = sum(weight * float(values[request][n]) for n in subset)
                    own[size] = max(own.get(size, -1.0), total)
        joined = [-1.0] * (len(best) + cap)
        for (size, total), have in itertools.product(own.items(), range(len(best))):
            if best[have] >= 0:
                joined[have + size] = max(joined[have + size], best[have] + total)
        best = joined
    return best
