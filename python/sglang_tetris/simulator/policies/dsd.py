"""One k for the whole batch, from a global acceptance rate: the paper's baseline DSD.

With acceptance rate a, a chain of k drafts yields (1 - a^(k + 1)) / (1 - a) tokens per
request; k = 0 .. most is chosen anew each round by tokens per second, with the true
cost table. The rate is a decayed mean over verified drafts. While nothing is drafted it
stays what it was, so that this baseline pays for no probes.

Source: the goodput rule of SmartSpec (arXiv 2406.14066), which DSD in the paper is.
"""

import numpy as np

from sglang_tetris.core.round_cost import Load
from sglang_tetris.core.round_plan import RoundPlan
from sglang_tetris.simulator.clock import Clock, total_s
from sglang_tetris.simulator.policies.base import FinishedRound, Policy
from sglang_tetris.simulator.trees import Choice, RoundTrees

_DECAY = 0.99
_FIRST_ROUNDS = 16  # that draft whatever it costs, to learn the rate
_FIRST_K = 3
# Costs change little from a round to the next.
_DECIDE_EVERY = 4


class GlobalRate(Policy):
    """See the module."""

    listens = True

    def __init__(self, name: str, clock: Clock, *, most: int = 8) -> None:
        super().__init__(name)
        self._clock, self._most = clock, most
        self._correct, self._tried = 0.0, 0.0
        self._num_rounds = 0
        self._k = _FIRST_K

    def plan(self, load: Load) -> RoundPlan:
        due = self._num_rounds % _DECIDE_EVERY == 0
        if self._num_rounds >= _FIRST_ROUNDS and due:
            self._k = self._best(load)
        self._num_rounds += 1
        return RoundPlan(depth=self._k, reads_prompts=self._k > 0)

    def choose(self, plan: RoundPlan, load: Load, trees: RoundTrees) -> Choice:
        return plan.depth

    def observe(self, finished: FinishedRound) -> None:
        if finished.trees is None:
            return
        correct = finished.trees.num_correct(finished.choice)
        # The first wrong draft of a chain was tried too, those behind it were not.
        tried = np.minimum(correct + 1, finished.trees.num_nodes)
        self._correct = _DECAY * self._correct + float(correct.sum())
        self._tried = _DECAY * self._tried + float(tried.sum())

    @property
    def rate(self) -> float:
        """Correct drafts per draft that followed correct ones."""
        return self._correct / self._tried if self._tried else 0.0

    def _best(self, load: Load) -> int:
        rate = self.rate
        speeds = [load.batch_size / total_s(self._clock.undrafted(load))]
        for k in range(1, self._most + 1):
            correct = load.batch_size * sum(rate**depth for depth in range(1, k + 1))
            parts = self._clock.drafted(
                load,
                depth=k,
                topk=1,
                num_drafting=load.batch_size,
                extended=load.batch_size + int(correct),
                num_drafts=k * load.batch_size,
                num_correct=int(correct),
            )
            speeds.append((load.batch_size + correct) / total_s(parts))
        return int(np.argmax(speeds))
