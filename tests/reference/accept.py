"""`match` verification on the tree itself, without a plan's links."""

from sglang_tetris.core import DraftTrees


def match(
    trees: DraftTrees, keep: list[list[bool]], target_tokens: list[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the followed rows and the emitted tokens per request, unpadded."""
    rows, tokens = [], []
    begin = 0
    for request, row in enumerate(keep):
        nodes = [-1] + [node for node, kept in enumerate(row) if kept]
        chosen = dict(
            zip(nodes, target_tokens[begin : begin + len(nodes)], strict=True)
        )
        node, path, emitted = -1, [], []
        while node is not None:
            path.append(begin + nodes.index(node))
            emitted.append(chosen[node])
            node = next(
                (
                    child
                    for child in nodes[1:]
                    if int(trees.parents[request, child]) == node
                    and int(trees.tokens[request, child]) == chosen[node]
                ),
                None,
            )
        rows.append(path)
        tokens.append(emitted)
        begin += len(nodes)
    return rows, tokens
