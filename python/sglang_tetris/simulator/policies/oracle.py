"""An oracle: it knows what the target will accept, and verifies nothing else.

With a clock it also drafts, each round, to the depth of the best tokens per second,
0 included; without one always to the end. With a budget per request it verifies at most
that many drafts per request on average, which bounds what any choice can reach.
"""

from collections.abc import Callable

import numpy as np

from sglang_tetris.core.auto_policy import RoundPlan
from sglang_tetris.core.round_cost import Load
from sglang_tetris.simulator.clock import Clock, total_s
from sglang_tetris.simulator.forests import Ints
from sglang_tetris.simulator.policies.base import Policy
from sglang_tetris.simulator.trees import Choice, RoundTrees


class Oracle(Policy):
    """See the module."""

    foresees = True

    def __init__(
        self,
        name: str,
        *,
        topk: int,
        max_depth: int,
        clock: Clock | None = None,
        per_request: int | None = None,
    ) -> None:
        super().__init__(name)
        self.topk = topk
        self._max_depth, self._clock = max_depth, clock
        self._per_request = per_request
        self._correct_lens = np.zeros(0, np.int64)
        self._extended = 0

    def foresee(self, correct_lens: Callable[[int], Ints], extended: int) -> None:
        self._correct_lens = correct_lens(self.topk)
        self._extended = extended

    def plan(self, load: Load) -> RoundPlan:
        if self._clock is None:
            return RoundPlan(depth=self._max_depth)
        speeds = [load.batch_size / total_s(self._clock.undrafted(load))]
        for depth in range(1, self._max_depth + 1):
            correct = int(np.minimum(self._correct_lens, depth).sum())
            parts = self._clock.drafted(
                load,
                depth=depth,
                topk=self.topk,
                num_drafting=load.batch_size,
                extended=self._extended,
                num_drafts=correct,
                num_correct=correct,
            )
            speeds.append((load.batch_size + correct) / total_s(parts))
        depth = int(np.argmax(speeds))
        return RoundPlan(depth=depth, reads_prompts=depth > 0)

    def choose(self, plan: RoundPlan, load: Load, trees: RoundTrees) -> Choice:
        right = trees.is_correct & (trees.depths > 0)
        if self._per_request is None:
            return right
        budget = self._per_request * trees.num_requests
        # All are worth the same: any beginning of the order by depth will do.
        order = np.where(right, trees.depths, trees.depth + 1)
        ranked = order.ravel().argsort(kind="stable")
        keep = np.zeros(right.size, np.bool_)
        keep[ranked[:budget]] = True
        return keep.reshape(right.shape) & right
