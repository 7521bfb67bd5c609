"""A fixed budget per request, moved freely within the batch.

`Paper` is the rule of arXiv 2502.15197: chains of k + extra, capacity k per request,
the draft's own probabilities. `Budgeted` is the same choice on any forest, made by
calibrated survival.
"""

from sglang_tetris.core.round_cost import Load
from sglang_tetris.core.round_plan import RoundPlan
from sglang_tetris.simulator.calibrator import Calibration
from sglang_tetris.simulator.policies.base import FinishedRound, Policy
from sglang_tetris.simulator.trees import Choice, RoundTrees


class Paper(Policy):
    """k drafts per request on average, out of chains of k + extra."""

    def __init__(self, name: str, k: int, extra: int) -> None:
        super().__init__(name)
        self._k, self._plan = k, RoundPlan(depth=k + extra)

    def plan(self, load: Load) -> RoundPlan:
        return self._plan

    def choose(self, plan: RoundPlan, load: Load, trees: RoundTrees) -> Choice:
        return trees.best(trees.probs, self._k * trees.num_requests)[0]


class Budgeted(Policy):
    """Ours at a fixed budget: k drafts per request on average, of calibrated trees."""

    listens = True

    def __init__(
        self, name: str, k: int, *, topk: int, depth: int, calibrator: Calibration
    ) -> None:
        super().__init__(name)
        self.topk = topk
        self._k, self._plan = k, RoundPlan(depth=depth)
        self._calibrator = calibrator

    def plan(self, load: Load) -> RoundPlan:
        return self._plan

    def choose(self, plan: RoundPlan, load: Load, trees: RoundTrees) -> Choice:
        probs = self._calibrator.calibrate(trees)
        return trees.best(probs, self._k * trees.num_requests)[0]

    def observe(self, finished: FinishedRound) -> None:
        assert finished.trees is not None
        self._calibrator.update(finished.trees, finished.choice)
