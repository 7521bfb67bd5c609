"""Which nodes of a round teach something about acceptance, and what.

A node is labelled if it was verified and its parent is the anchor or a correct node:
only there did the target say what follows. It is correct if it is on the followed
path. A node under a wrong parent was verified too, but against a text that never came
to be. Of equal siblings only the lower node can be followed; the others have no label.

Whether a walk was cut short (a grammar that ended, a request that stopped) is not
visible here: the children of its last row were then not really compared, and the caller
leaves such requests out.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sglang_tetris.core.backend import host_loops
from sglang_tetris.core.errors import check_tensor
from sglang_tetris.core.node_ranks import depths_and_ranks
from sglang_tetris.core.types import AcceptResult, DraftTrees, VerifyPlan

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]


class LabelledNodes(NamedTuple):
    """One round's labels, flat, by request and then by node.

    probs     [n] float32, the draft's probability
    depths    [n] int64, 1 = child of the anchor
    ranks     [n] int64, among the siblings as drafted; see core.node_ranks
    requests  [n] int64, place in the batch
    correct   [n] bool
    """

    probs: npt.NDArray[np.float32]
    depths: Ints
    ranks: Ints
    requests: Ints
    correct: Bools


def labelled_nodes(
    trees: DraftTrees,
    plan: VerifyPlan,
    accepted: AcceptResult,
    *,
    usable: torch.Tensor | None = None,
) -> LabelledNodes:
    """Return the labels of one round, as host arrays; waits for an accelerator.

    trees     as drafted, with the draft's own probabilities
    plan      built from these trees, accepted: what was followed in it
    usable    [bs] bool, requests whose walk was not cut short; None = all

    Raises ValueError if the arguments do not belong together.
    """
    rows, device = (trees.batch_size,), trees.tokens.device
    for name, batch_size in (
        ("plan", plan.batch_size),
        ("accepted", accepted.accept_index.shape[0]),
    ):
        if batch_size != trees.batch_size:
            raise ValueError(
                f"{name} must be of {trees.batch_size} requests, as the trees are, "
                f"got {batch_size}"
            )
    if usable is None:
        usable = torch.ones(rows, dtype=torch.bool)
    else:
        check_tensor("usable", usable, "[bs]", rows, torch.bool, device)
    tokens, parents, node_ids, indptr, followed, use = (
        np.ascontiguousarray(tensor.cpu().numpy())
        for tensor in (
            trees.tokens,
            trees.parents,
            plan.node_ids,
            plan.qo_indptr,
            accepted.accept_index,
            usable,
        )
    )
    if node_ids.size and node_ids.max() >= trees.max_nodes:
        raise ValueError(
            f"plan.node_ids must be below {trees.max_nodes}, the trees' max_nodes, "
            f"got {node_ids.max()}"
        )
    if followed.size and followed.max() >= len(node_ids):
        raise ValueError(
            f"accepted.accept_index must be below {len(node_ids)}, the plan's rows, "
            f"got {followed.max()}"
        )
    places, correct = np.empty(len(node_ids), np.int64), np.empty(len(node_ids), bool)
    loops = host_loops()
    fill = fill_labels if loops is None else loops.cpu_calibrate.fill_labels
    count = fill(tokens, parents, node_ids, indptr, followed, use, places, correct)
    places = places[:count]
    depths, ranks = (values.cpu().numpy() for values in depths_and_ranks(trees))
    return LabelledNodes(
        probs=trees.accept_probs.detach().cpu().numpy().ravel()[places],
        depths=depths.ravel()[places],
        ranks=ranks.ravel()[places],
        requests=places // max(trees.max_nodes, 1),
        correct=correct[:count],
    )


def fill_labels(
    tokens: Ints,
    parents: Ints,
    node_ids: Ints,
    qo_indptr: Ints32,
    accept_index: Ints32,
    usable: Bools,
    places: Ints,
    correct: Bools,
) -> int:
    """Fill the fronts of the last two arguments and return how long they are.

    places: request * max_nodes + node of every labelled node. A plain loop, which
    core.cpu_calibrate compiles.
    """
    bs, max_nodes = tokens.shape
    followed = np.empty(max_nodes, np.bool_)
    count = 0
    for request in range(bs):
        if not usable[request]:
            continue
        followed[:] = False
        for row in accept_index[request, 1:]:
            if row < 0:
                break
            followed[node_ids[row]] = True
        begin = qo_indptr[request] + 1
        for row in range(begin, qo_indptr[request + 1]):
            node = node_ids[row]
            parent = parents[request, node]
            if parent >= 0 and not followed[parent]:
                continue
            duplicate = False
            for earlier in range(begin, row):
                other = node_ids[earlier]
                duplicate |= (
                    parents[request, other] == parent
                    and tokens[request, other] == tokens[request, node]
                )
            if not duplicate:
                places[count] = request * max_nodes + node
                correct[count] = followed[node]
                count += 1
    return count
