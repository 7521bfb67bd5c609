"""The drafts of one round, and what became of them.

Selection is the core's, called by its compiled loops: a simulation makes millions of
calls, and a record's checks would be most of its time.
"""

from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sglang_tetris.core.cpu_select import fill_selection, fill_survival
from sglang_tetris.simulator.forests import Recording

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
T = TypeVar("T", bound=np.generic)
# What a policy verifies: all drafts down to a depth, or those marked.
Choice = int | Bools

_NO_WEIGHTS = np.empty(0, np.float32)
_NO_COUNTS = np.empty(0, np.int64)


class RoundTrees:
    """The trees that R requests draft in one round, `depth` levels of them.

    Arrays are `[R, W]`, W the nodes of the largest tree; fields as of DraftTrees.
    `rows` `[R]` are their places in the recording; `left` `[R]` counts the tokens that
    each request will still emit. Only the oracle may look at `is_correct` before it has
    chosen.
    """

    def __init__(
        self, recording: Recording, topk: int, rows: Ints, depth: int, classes: Ints
    ) -> None:
        forest = recording.forest(topk)
        self._forest, self.rows = forest, rows
        self.depth = min(depth, forest.max_depth)
        self.num_nodes: Ints = forest.num_nodes_to[rows, self.depth]
        self.sampling_classes = classes
        self.left: Ints = recording.left[rows]
        self._width = int(self.num_nodes.max(initial=0))

    @property
    def num_requests(self) -> int:
        return len(self.rows)

    @cached_property
    def parents(self) -> Ints:
        return self._cut(self._forest.parents)

    @cached_property
    def probs(self) -> Floats:
        """The draft model's own probabilities, given the parent."""
        return self._cut(self._forest.probs)

    @cached_property
    def depths(self) -> Ints:
        """1 = child of the anchor, 0 at padding and below `depth`."""
        depths = self._cut(self._forest.depths)
        return np.where(depths <= self.depth, depths, 0)

    @cached_property
    def ranks(self) -> Ints:
        return self._cut(self._forest.ranks)

    @cached_property
    def is_correct(self) -> Bools:
        return self._cut(self._forest.is_correct)

    @cached_property
    def is_compared(self) -> Bools:
        """Whether the text goes as far as the node's parent, so that it has a label."""
        above = np.take_along_axis(self.is_correct, np.maximum(self.parents, 0), 1)
        compared: Bools = (self.depths > 0) & (above | (self.parents < 0))
        return compared

    def survival(self, accept_probs: Floats) -> Floats:
        """Return `path_survival` of the trees with these probabilities."""
        survival = np.empty_like(accept_probs)
        fill_survival(self.parents, accept_probs, self.num_nodes, survival)
        return survival

    def best(
        self, accept_probs: Floats, draft_budget: int, *, max_drafts: int | None = None
    ) -> tuple[Bools, float]:
        """Return `select_draft_tokens`' keep, and the drafts expected to be correct."""
        shape = accept_probs.shape
        keep = np.empty(shape, np.bool_)
        expected = np.empty(shape[0], np.float32)
        fill_selection(
            self.parents,
            accept_probs,
            self.num_nodes,
            _NO_WEIGHTS,
            _NO_COUNTS if max_drafts is None else np.full(shape[0], max_drafts),
            _NO_COUNTS,
            min(draft_budget, accept_probs.size),
            keep,
            np.empty(shape[0], np.int32),
            expected,
        )
        return keep, float(expected.sum())

    def num_correct(self, choice: Choice) -> Ints:
        """Return how many of the chosen drafts were correct, `[R]`."""
        if isinstance(choice, int):
            most = self._forest.num_correct[self.rows]
            return np.minimum(most, min(choice, self.depth))
        correct: Ints = (choice & self.is_correct).sum(1)
        return correct

    def num_chosen(self, choice: Choice) -> int:
        """Return how many drafts are verified."""
        if isinstance(choice, int):
            depth = min(choice, self.depth)
            return int(self._forest.num_nodes_to[self.rows, depth].sum())
        return int(choice.sum())

    def _cut(self, array: npt.NDArray[T]) -> npt.NDArray[T]:
        """Return the round's rows, contiguous as the loops want them."""
        return np.ascontiguousarray(array[self.rows, : self._width])
