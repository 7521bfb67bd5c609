"""`--tetris-budget auto`: the very policy that runs on a server.

It is told what the server's worker would tell it, and no more: the measured times of
each round's parts, the drafts' survival, and how many of the verified were correct.
"""

from collections.abc import Sequence

import numpy as np

from sglang_tetris.core.auto_policy import AutoPolicy, RoundPlan
from sglang_tetris.core.cost_table import CostTable
from sglang_tetris.core.round_cost import Load, RoundCost
from sglang_tetris.simulator.calibrator import Calibration
from sglang_tetris.simulator.clock import Part
from sglang_tetris.simulator.policies.base import FinishedRound, Policy
from sglang_tetris.simulator.trees import Choice, Floats, RoundTrees


class Auto(Policy):
    """AutoPolicy with its own RoundCost, from a profile or from measurements alone.

    always_reads  the draft reads prompts also while nothing is drafted
    """

    listens = True

    def __init__(
        self,
        name: str,
        *,
        topk: int,
        max_depth: int,
        calibrator: Calibration,
        profile: CostTable | None = None,
        always_reads: bool = False,
    ) -> None:
        super().__init__(name)
        self.topk = topk
        self.cost = RoundCost(profile)
        self.policy = AutoPolicy(
            self.cost, max_depth=max_depth, topk=topk, always_reads=always_reads
        )
        self._calibrator = calibrator
        self._survival: Floats = np.zeros((0, 0), np.float32)
        self._num_expected = 0.0

    def plan(self, load: Load) -> RoundPlan:
        return self.policy.plan_round(load)

    def choose(self, plan: RoundPlan, load: Load, trees: RoundTrees) -> Choice:
        probs = self._calibrator.calibrate(trees)
        self._survival = trees.survival(probs)
        values = self._survival[trees.depths > 0].astype(np.float64)
        values.sort()
        budget = self.policy.draft_budget(plan, load, values[::-1])
        keep, self._num_expected = trees.best(probs, budget)
        return keep

    def observe_prompts(self, num_tokens: int, parts: Sequence[Part]) -> None:
        self.cost.observe_all(parts)
        self.policy.observe_prompts(num_tokens)

    def observe(self, finished: FinishedRound) -> None:
        self.cost.observe_all(finished.parts)
        if finished.trees is None:
            return
        self.policy.observe_drafts(
            finished.plan,
            self._survival,
            finished.trees.depths,
            num_expected=self._num_expected,
            num_correct=finished.num_correct,
        )
        self._calibrator.update(finished.trees, finished.choice)
