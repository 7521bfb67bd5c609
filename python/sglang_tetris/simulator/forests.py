"""A recording as forests that policies draft from: its chains, and its trees.

The recording holds, at each position, the union of a greedy chain and a tree of topk
branches. `topk` 1 gives the chain, any other the tree, which is what a drafter of that
topk would have grown: children of the topk nodes of highest survival of a level. Below
its last recorded level the tree goes on as its chain does, where the drafter would have
followed it. Nodes stand level by level, so a tree of depth d is the row's beginning.

A draft counts as correct only where it is part of the text: the last recorded token is
always a bonus token.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_tetris.core import DraftTrees, path_survival
from sglang_tetris.core.node_ranks import depths_and_ranks
from sglang_tetris.core.replay import Replay

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forest:
    """One tree per position of a recording. D is the deepest level.

    parents, probs   [P, W] as of DraftTrees
    depths, ranks    [P, W] int64 as of core.node_ranks: depth 1 = child of the anchor,
                     rank among siblings; 0 at padding
    is_correct       [P, W] bool, the node is part of the text
    num_nodes_to     [P, D + 1] int64, nodes of depth <= d
    num_correct      [P] int64, drafts that the whole tree would have accepted
    """

    parents: Ints
    probs: Floats
    depths: Ints
    ranks: Ints
    is_correct: Bools
    num_nodes_to: Ints
    num_correct: Ints

    @property
    def max_depth(self) -> int:
        return int(self.num_nodes_to.shape[1]) - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """What the simulator replays: the forests and where each request's rows are.

    row_starts      [R + 1] int64
    left            [P] int64, tokens still to come at a row
    prompt_tokens   [R] int64, those to be read ahead of the request's first round
    sampling_class  [R] int64
    """

    chains: Forest
    trees: Forest
    row_starts: Ints
    left: Ints
    prompt_tokens: Ints
    sampling_class: Ints

    @classmethod
    def from_replay(cls, replay: Replay) -> "Recording":
        """Split a recording's trees into its chains and its trees of `topk`."""
        left = np.repeat(replay.row_starts[1:], np.diff(replay.row_starts))
        # Tokens still to come at a row: the last of them is never a draft.
        left = left - np.arange(len(left))
        everything = _draft_trees(replay.parents, replay.probs, replay.num_nodes)
        depths = depths_and_ranks(everything)[0].numpy()
        is_correct = replay.is_correct & (depths < left[:, None])
        header = replay.header
        chain = _chain_nodes(replay, header.max_chain)
        grown = _grown(replay, depths, path_survival(everything).numpy(), chain)
        requests = header.requests
        return cls(
            chains=_forest(replay, chain, depths, is_correct),
            trees=_forest(replay, grown, depths, is_correct),
            row_starts=replay.row_starts,
            left=left,
            # The anchor of the first row is emitted, but not read yet.
            prompt_tokens=np.array([r.prompt_tokens for r in requests], np.int64)
            + np.maximum(replay.first_positions - 1, 0),
            sampling_class=np.array([r.sampling_class for r in requests], np.int64),
        )

    @property
    def num_requests(self) -> int:
        return len(self.prompt_tokens)

    @property
    def num_tokens(self) -> int:
        return int(self.row_starts[-1])

    def forest(self, topk: int) -> Forest:
        """Return the chains for topk 1, the trees for any other."""
        return self.chains if topk == 1 else self.trees


def _draft_trees(parents: Ints, probs: Floats, num_nodes: Ints) -> DraftTrees:
    """Return the arrays as the core takes them; tokens do not matter here."""
    return DraftTrees(
        tokens=torch.zeros(parents.shape, dtype=torch.int64),
        parents=torch.from_numpy(parents),
        accept_probs=torch.from_numpy(probs),
        num_nodes=torch.from_numpy(num_nodes),
    )


def _chain_nodes(replay: Replay, max_chain: int) -> Bools:
    """Mark the nodes reached by always taking the most probable child."""
    is_node = np.arange(replay.parents.shape[1]) < replay.num_nodes[:, None]
    rows = np.arange(len(replay.parents))
    chosen = np.zeros(replay.parents.shape, np.bool_)
    current = np.full(len(rows), -1, np.int64)
    for _ in range(max_chain):
        children = is_node & (replay.parents == current[:, None])
        at = np.where(children, replay.probs, -1.0).argmax(1)
        goes_on = children.any(1) & (current > -2)
        chosen[rows[goes_on], at[goes_on]] = True
        # -2 is nobody's parent: a chain that ended does not begin again.
        current = np.where(goes_on, at, -2)
    return chosen


def _grown(replay: Replay, depths: Ints, survival: Floats, chain: Bools) -> Bools:
    """Mark the nodes that a drafter of the recorded topk would have grown."""
    topk, num_steps = replay.header.topk, replay.header.num_steps
    rows = np.arange(len(depths))[:, None]
    grown: Bools = depths == 1
    for level in range(2, int(depths.max(initial=0)) + 1):
        here = grown & (depths == level - 1)
        order = np.where(here, -survival, np.inf).argsort(1, kind="stable")[:, :topk]
        extended = np.zeros_like(grown)
        extended[rows, order] = True
        extended &= here
        parent = replay.parents
        follows = extended[rows, np.maximum(parent, 0)] & (parent >= 0)
        follows &= depths == level
        grown = grown | (follows if level <= num_steps else follows & chain)
    return grown


def _forest(replay: Replay, kept: Bools, depths: Ints, is_correct: Bools) -> Forest:
    """Cut the kept nodes out, level by level."""
    level = np.where(kept, depths, np.iinfo(np.int64).max)
    order = level.argsort(1, kind="stable")
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(order.shape[1])[None], 1)
    width = int(kept.sum(1).max(initial=0))
    order = order[:, :width]
    kept = np.take_along_axis(kept, order, 1)
    parents = np.take_along_axis(replay.parents, order, 1)
    moved = np.take_along_axis(place, np.maximum(parents, 0), 1)
    depths = np.where(kept, np.take_along_axis(depths, order, 1), 0)
    is_correct = kept & np.take_along_axis(is_correct, order, 1)
    deepest = int(depths.max(initial=0))
    levels = np.arange(deepest + 1)
    parents = np.where(kept & (parents >= 0), moved, -1)
    probs = np.where(kept, np.take_along_axis(replay.probs, order, 1), np.float32(0))
    ranks = depths_and_ranks(_draft_trees(parents, probs, kept.sum(1)))[1].numpy()
    inside = kept[:, :, None] & (depths[:, :, None] <= levels)
    return Forest(
        parents=parents,
        probs=probs,
        depths=depths,
        ranks=ranks,
        is_correct=is_correct,
        num_nodes_to=inside.sum(1),
        num_correct=is_correct.sum(1),
    )
