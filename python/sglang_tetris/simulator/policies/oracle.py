"""An oracle: it knows what the target will accept, and verifies nothing else.

With a clock it also drafts, each round, to the depth of the best tokens per second,
0 included; without one always to the end. With a budget per request it verifies at most
that many drafts per request on average, which bounds what any choice can reach.
"""

from collections.abc import Callable, Sequence

import numpy as np

from sglang_tetris.core.round_cost import Load
from sglang_tetris.core.round_plan import RoundPlan
from sglang_tetris.simulator.clock import Clock, Part, total_s
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
        # Seconds that drafting would have saved since it stopped.
        self._missed_s = 0.0

    def foresee(self, correct_lens: Callable[[int], Ints], extended: int) -> None:
        self._correct_lens = correct_lens(self.topk)
        self._extended = extended

    def plan(self, load: Load) -> RoundPlan:
        if self._clock is None:
            return RoundPlan(depth=self._max_depth)
        # While the draft goes on, it reads about what a round emits.
        usual = min(self._extended, 2 * load.batch_size)
        plain_s = total_s(self._clock.undrafted(load)) / load.batch_size
        times_s = [plain_s]
        for depth in range(1, self._max_depth + 1):
            correct = int(np.minimum(self._correct_lens, depth).sum())
            parts = self._drafted(load, depth, usual, correct)
            times_s.append(total_s(parts) / (load.batch_size + correct))
        depth = int(np.argmin(times_s))
        backlog_s = total_s(self._drafted(load, 1, self._extended, 0)) - total_s(
            self._drafted(load, 1, usual, 0)
        )
        # What was emitted undrafted is read once it would have paid for itself.
        self._missed_s += (plain_s - times_s[depth]) * load.batch_size
        if self._missed_s < backlog_s:
            depth = 0
        if depth or backlog_s == 0:
            self._missed_s = 0.0
        return RoundPlan(depth=depth, reads_prompts=depth > 0)

    def _drafted(
        self, load: Load, depth: int, extended: int, correct: int
    ) -> Sequence[Part]:
        assert self._clock is not None
        return self._clock.drafted(
            load,
            depth=depth,
            topk=self.topk,
            num_drafting=load.batch_size,
            extended=extended,
            num_drafts=correct,
            num_correct=correct,
        )

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
