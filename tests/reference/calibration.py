"""Ranks and labels in plain loops."""

from sglang_tetris.core import DraftTrees
from tests.reference.selection import depth


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
