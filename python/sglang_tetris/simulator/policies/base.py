"""What a policy is asked and told, round by round.

plan(load)                how deep to draft, before any draft is seen
choose(plan, load, trees) what to verify of it
observe(round)            how it went, if the policy `listens`
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_tetris.core.round_cost import Load
from sglang_tetris.core.round_plan import RoundPlan
from sglang_tetris.simulator.clock import Part
from sglang_tetris.simulator.forests import Ints
from sglang_tetris.simulator.trees import Choice, RoundTrees


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRound:
    """What a server knows after a round.

    trees, choice  None and 0 where nothing was drafted
    num_drafts     drafts that were verified
    parts          the steps; a policy is told measured times
    """

    plan: RoundPlan
    load: Load
    trees: RoundTrees | None
    choice: Choice
    num_drafts: int
    num_correct: int
    parts: Sequence[Part]


class Policy:
    """The interface, and the behaviour of plain decoding.

    name      what it is called in tables
    topk      1 = it drafts chains, more = trees
    listens   whether `observe` is to be called
    foresees  whether `foresee` is to be called: the oracle alone
    drafts    whether the server keeps a draft's state at all
    """

    topk = 1
    listens = False
    foresees = False
    drafts = True

    def __init__(self, name: str) -> None:
        self.name = name

    def foresee(self, correct_lens: Callable[[int], Ints], extended: int) -> None:
        """Look at the coming round: drafts that topk's whole trees would get right."""

    def plan(self, load: Load) -> RoundPlan:
        """Return how deep the next round drafts."""
        return RoundPlan(depth=0)

    def choose(self, plan: RoundPlan, load: Load, trees: RoundTrees) -> Choice:
        """Return what is verified of the trees."""
        return 0

    def observe_prompts(self, num_tokens: int, parts: Sequence[Part]) -> None:
        """Take in that so many tokens of prompts were read."""

    def observe(self, finished: FinishedRound) -> None:
        """Take in a round."""
