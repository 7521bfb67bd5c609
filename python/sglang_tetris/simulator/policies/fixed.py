"""Policies that do not adapt: nothing, k drafts of a chain, a tree of fixed size."""

from sglang_tetris.core.round_cost import Load
from sglang_tetris.core.round_plan import RoundPlan
from sglang_tetris.simulator.policies.base import Policy
from sglang_tetris.simulator.trees import Choice, RoundTrees


class NoSpeculation(Policy):
    """Plain decoding, without a draft model."""

    drafts = False


class FixedChain(Policy):
    """k drafts of every request, every round."""

    def __init__(self, name: str, k: int) -> None:
        super().__init__(name)
        self._plan = RoundPlan(depth=k)

    def plan(self, load: Load) -> RoundPlan:
        return self._plan

    def choose(self, plan: RoundPlan, load: Load, trees: RoundTrees) -> Choice:
        return plan.depth


class FixedTree(Policy):
    """The best drafts of every request's tree by the draft's own probabilities.

    As EAGLE-2 does: so many steps, and so many drafts per request.
    """

    topk = 3

    def __init__(self, name: str, *, num_steps: int, num_drafts: int) -> None:
        super().__init__(name)
        self._plan = RoundPlan(depth=num_steps)
        self._num_drafts = num_drafts

    def plan(self, load: Load) -> RoundPlan:
        return self._plan

    def choose(self, plan: RoundPlan, load: Load, trees: RoundTrees) -> Choice:
        budget = self._num_drafts * trees.num_requests
        keep, _ = trees.best(trees.probs, budget, max_drafts=self._num_drafts)
        return keep
