"""The verify plan and its masks in plain loops."""

import itertools

from sglang_tetris.core import DraftTrees


def plan(
    trees: DraftTrees,
    keep: list[list[bool]],
    anchors: list[int],
    prefix_lens: list[int],
) -> dict[str, list]:
    """Return the fields of an unpadded VerifyPlan as nested lists."""
    lens = [1 + sum(row) for row in keep]
    width = max(lens, default=1)
    out: dict[str, list] = {
        name: []
        for name in ("input_ids", "positions", "node_ids", "tree_mask", "custom_mask")
    }
    tables = ("index", "next_token", "next_sibling", "parent")
    out |= {f"retrieve_{name}": [] for name in tables}
    out["qo_indptr"] = [0]
    deepest = 0
    for request, row in enumerate(keep):
        nodes = [-1] + [node for node, kept in enumerate(row) if kept]
        place = {node: i for i, node in enumerate(nodes)}
        parents = trees.parents[request].tolist()
        paths = []
        for node in nodes:
            path = {node}
            while node >= 0:
                node = parents[node]
                path.add(node)
            paths.append(path)
        begin = len(out["input_ids"])
        for node, path in zip(nodes, paths, strict=True):
            token = anchors[request] if node < 0 else int(trees.tokens[request, node])
            out["input_ids"].append(token)
            out["positions"].append(prefix_lens[request] + len(path) - 1)
            deepest = max(deepest, len(path) - 1)
            out["node_ids"].append(node)
            mask = [other in path for other in nodes]
            out["tree_mask"] += mask
            out["custom_mask"] += [True] * prefix_lens[request] + mask
        children = [
            [place[other] for other in nodes[1:] if parents[other] == node]
            for node in nodes
        ]
        sibling = {a: b for group in children for a, b in itertools.pairwise(group)}
        missing = [-1] * (width - len(nodes))
        out["retrieve_index"].append([begin + i for i in range(len(nodes))] + missing)
        out["retrieve_next_token"].append(
            [min(group, default=-1) for group in children] + missing
        )
        out["retrieve_next_sibling"].append(
            [sibling.get(i, -1) for i in range(len(nodes))] + missing
        )
        out["retrieve_parent"].append(
            [-1] + [place[parents[node]] for node in nodes[1:]] + missing
        )
        out["qo_indptr"].append(begin + len(nodes))
    out["max_depth"] = deepest
    return out
