"""Compiled loops of the verify plan and of acceptance; core.layout and core.accept
define both.
"""

import numpy as np
import numpy.typing as npt

from sglang_tetris.core.jit import compiled

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]


@compiled("UniTuple(i8, 5)(i8[:,::1], i8[::1], b1[:,::1], i4[::1], i8[::1], i8)")
def measure_plan(
    parents: Ints,
    num_nodes: Ints,
    keep: Bools,
    verify_lens: Ints32,
    prefix_lens: Ints,
    max_depth: int,
) -> tuple[int, int, int, int, int]:
    """Rows, mask elements, longest request, deepest node, and 1 if all is consistent.

    Consistent: no padding kept, closed under parents, lengths equal to 1 + kept nodes,
    no negative prefix, nothing deeper than `max_depth`.
    """
    bs, max_nodes = parents.shape
    depths = np.empty(max_nodes, np.int64)
    rows, elements, longest, deepest = 0, 0, 1, 0
    for request in range(bs):
        length = 1
        for node in range(max_nodes):
            if not keep[request, node]:
                continue
            # First of all, since a padded node's parent may be any number.
            if node >= num_nodes[request]:
                return 0, 0, 0, 0, 0
            parent = parents[request, node]
            if parent >= 0 and not keep[request, parent]:
                return 0, 0, 0, 0, 0
            depths[node] = depths[parent] + 1 if parent >= 0 else 1
            deepest = max(deepest, depths[node])
            length += 1
        if length != verify_lens[request] or prefix_lens[request] < 0:
            return 0, 0, 0, 0, 0
        rows += length
        elements += length * length
        longest = max(longest, length)
    if deepest > max_depth:
        return 0, 0, 0, 0, 0
    return rows, elements, longest, deepest, 1


@compiled(
    "void(i8[:,::1], i8[:,::1], b1[:,::1], i4[::1], i8[::1], i8[::1], "
    "i8[:,::1], i4[::1], i8[:,:,::1], b1[::1])"
)
def fill_plan(
    tokens: Ints,
    parents: Ints,
    keep: Bools,
    verify_lens: Ints32,
    anchors: Ints,
    prefix_lens: Ints,
    rows: Ints,
    qo_indptr: Ints32,
    tables: Ints,
    tree_mask: Bools,
) -> None:
    """Fill the last four arguments, padding included.

    rows [3, T]: input_ids, positions, node_ids; tables [4, bs, W]: retrieve_index,
    next_token, next_sibling, parent. One array each, since a call pays for every one.
    """
    bs, max_nodes = tokens.shape
    input_ids, positions, node_ids = rows[0], rows[1], rows[2]
    retrieve_index, retrieve_next_token = tables[0], tables[1]
    retrieve_next_sibling, retrieve_parent = tables[2], tables[3]
    width = retrieve_index.shape[1]
    place_of = np.empty(max_nodes, np.int64)
    last_child = np.empty(width, np.int64)
    row, element = 0, 0
    for request in range(bs):
        length = verify_lens[request]
        qo_indptr[request] = row
        for place in range(width):
            retrieve_index[request, place] = row + place if place < length else -1
            retrieve_next_token[request, place] = -1
            retrieve_next_sibling[request, place] = -1
            retrieve_parent[request, place] = -1
        input_ids[row] = anchors[request]
        positions[row] = prefix_lens[request]
        node_ids[row] = -1
        block = tree_mask[element : element + length * length].reshape(length, length)
        block[0, :] = False
        block[0, 0] = True
        last_child[0] = 0
        place = 0
        for node in range(max_nodes):
            if not keep[request, node]:
                continue
            place += 1
            place_of[node] = place
            parent = 0
            if parents[request, node] >= 0:
                parent = place_of[parents[request, node]]
            input_ids[row + place] = tokens[request, node]
            positions[row + place] = positions[row + parent] + 1
            node_ids[row + place] = node
            retrieve_parent[request, place] = parent
            # Place 0 is the anchor, nobody's child: it stands for "no child yet".
            if last_child[parent] == 0:
                retrieve_next_token[request, parent] = place
            else:
                retrieve_next_sibling[request, last_child[parent]] = place
            last_child[parent] = place
            last_child[place] = 0
            # The whole row, which the compiler turns into a few wide moves; they are
            # its clearing too, and cheaper than a walk up the path.
            for column in range(length):
                block[place, column] = block[parent, column]
            block[place, place] = True
        row += length
        element += length * length
    qo_indptr[bs] = row
    input_ids[row:] = 0
    positions[row:] = 0
    node_ids[row:] = -1
    tree_mask[element:] = False


@compiled(
    "void(i8[::1], i8[::1], i8[:,::1], i8[:,::1], i8[:,::1], "
    "i4[:,::1], i4[::1], i8[:,::1])"
)
def fill_accepted(
    input_ids: Ints,
    target_tokens: Ints,
    retrieve_index: Ints,
    retrieve_next_token: Ints,
    retrieve_next_sibling: Ints,
    accept_index: Ints32,
    accept_lens: Ints32,
    accept_tokens: Ints,
) -> None:
    """Fill the last three arguments."""
    bs, columns = accept_tokens.shape
    for request in range(bs):
        place, length = 0, 0
        while place >= 0 and length < columns:
            row = retrieve_index[request, place]
            token = target_tokens[row]
            accept_index[request, length] = row
            accept_tokens[request, length] = token
            length += 1
            place = retrieve_next_token[request, place]
            while place >= 0 and input_ids[retrieve_index[request, place]] != token:
                place = retrieve_next_sibling[request, place]
        accept_lens[request] = length
        accept_index[request, length:] = -1
        accept_tokens[request, length:] = -1
