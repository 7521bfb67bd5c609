"""`--tetris-budget auto`: whether to draft, how deep, and how much to verify.

Two decisions, both by tokens per second (N requests, F expected correct drafts):

1. `plan_round`, before drafting, from earlier rounds only. Every depth, with 0 = plain
   decoding, has a rate (core.depth_rates). The depth in use is left once what staying
   costs has come to what changing costs: the log ratios of the best other rate to its
   own are added up, not below 0, until they make a tenth of a round, or the time that
   the draft would take to catch up if drafting begins or ends. A load that moves around
   a threshold adds nothing.
2. `draft_budget`, after drafting, whose cost is then spent: the B that maximises

       F(B) * (1 - rate * later) - rate * verify(N + B)

   with the rate of the depth in use and what one more token causes later; F is the sum
   of the B best survivals (weighted, if requests have weights). The verify's time has
   steps, so all B are looked at. For identical rounds this maximises the rate.

What is not used cannot be judged, so now and then a round is spent on it, each kind as
rarely as keeps its loss at a thousandth of the time: while drafting, rounds of full
depth and plain ones (`check`); while not drafting, rounds in which a few requests draft
to the full depth (`probe`), and some of it is verified whatever it is worth. Probes
follow each other when they find much more than was expected. Before anything is known,
rounds of both kinds take turns (`exploring`).

Under `rejection` verification the second decision must not look at this round's
drafts: `RoundPlan.draft_budget` is the first decision's own.

Not decided here: which drafts (core.allocator), and what is measured (the adapter).
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from sglang_tetris.core.depth_rates import DepthRates
from sglang_tetris.core.held_estimates import HeldEstimates
from sglang_tetris.core.prompt_steps import PromptSteps
from sglang_tetris.core.round_cost import Load, RoundCost
from sglang_tetris.core.round_plan import RoundPlan
from sglang_tetris.core.survival_profile import SurvivalProfile

__all__ = ["AutoPolicy", "Load", "RoundPlan"]

Reals = npt.NDArray[np.float64]

_ENOUGH = 0.10  # rounds lost at the depth in use that move it, at least
# Tokens of a request that the draft has to read when it comes back, about.
_UNREAD = 64
_NUM_EXPLORED = 8  # rounds of either kind that are measured first
# Budgets of these rounds, per request: costs are learnt from rounds that differ.
_EXPLORED_BUDGETS = (2.0, 0.5, 1.0)
_PROBED_REQUESTS = 4
_PROBED_DRAFTS = 2  # per probed request, at least
_LOOKING = 0.001  # what looking aside may cost, as a share of the time
_MOST_ROUNDS, _LEAST_ROUNDS, _SURPRISED_ROUNDS = 1024, 16, 4


class AutoPolicy:
    """See the module. One per server; host values only, deterministic.

    cost          what rounds cost; its owner feeds it with measurements
    max_depth     levels that can be drafted
    topk          branches of a draft step
    always_reads  whether the draft must read prompts also while nothing is drafted

    `plan_round` is called once per round, after the round before was observed.
    num_explored counts the rounds planned to explore.
    """

    def __init__(
        self,
        cost: RoundCost,
        *,
        max_depth: int,
        topk: int,
        always_reads: bool = True,
    ) -> None:
        self.cost = cost
        self.profile = SurvivalProfile(max_depth)
        self.depth = 0
        self.num_explored = 0
        self._max_depth, self._topk = max_depth, topk
        self._always_reads = always_reads
        self._prompts = PromptSteps()
        self._known = HeldEstimates(
            cost, self.profile, self._prompts, topk=topk, always_reads=always_reads
        )
        self._score = 0.0
        # Tokens per second, and what a token is worth less what it causes later.
        self._price, self._worth = 0.0, 1.0
        # Rounds since each depth was last drafted, 0 = since a plain round.
        self._since = np.zeros(max_depth + 1, np.int64)
        self._probe_after = self._affordable = _MOST_ROUNDS
        self._last: tuple[RoundPlan, int] | None = None

    @property
    def is_exploring(self) -> bool:
        """Whether there is not enough known yet to choose by rates."""
        if not self.profile.is_known(self._max_depth):
            return True
        measured = [
            self.cost.num_measured(drafted=drafted) for drafted in (False, True)
        ]
        return not self.cost.has_profile and min(measured) < _NUM_EXPLORED

    def plan_round(self, load: Load) -> RoundPlan:
        """Return how the next round is to be run; see the module."""
        self._count_last_round()
        plan = self._plan(load)
        if not (self._always_reads or self.depth or plan.reason == "exploring"):
            plan = replace(plan, reads_prompts=False)
        self._last = (plan, load.batch_size)
        return plan

    def rates(self, load: Load) -> DepthRates:
        """Return what each depth is expected to yield."""
        return self._known.fresh_rates(load)

    def draft_budget(self, plan: RoundPlan, load: Load, values: Reals) -> int:
        """Return how many drafts to verify, now that they are known.

        values  survivals of the drafts there are, best first (weighted, if requests
                have weights)
        """
        least = min(plan.least_budget, len(values))
        if plan.reason == "exploring" or len(values) == 0:
            return least
        drafts, time_s = self._known.verify_grid(load, len(values))
        end = int(drafts.searchsorted(len(values), side="right"))
        correct = np.append(0.0, values.cumsum())[drafts[:end]]
        gain = self._worth * correct - self._price * time_s[:end]
        return max(int(drafts[gain.argmax()]), least)

    def observe_drafts(
        self,
        plan: RoundPlan,
        survival: npt.NDArray[np.float32],
        depths: npt.NDArray[np.int64],
        *,
        num_expected: float,
        num_correct: int,
    ) -> None:
        """Take in a drafted round's trees, `[requests, nodes]`, and its outcome.

        num_expected is the sum of the verified drafts' survival.
        """
        if plan.reason == "probe":
            # Two standard deviations of a sum of rare events, and at least two more.
            many = num_correct > num_expected + max(2.0, 2.0 * num_expected**0.5)
            usual = self.profile.correct_per_request() * len(survival)
            better = float(survival[depths > 0].sum()) > 2.0 * usual
            surprised = many or better
            self._probe_after = _SURPRISED_ROUNDS if surprised else self._affordable
        self.profile.add(
            survival,
            depths,
            drafted_depth=plan.depth,
            num_expected=num_expected,
            num_correct=num_correct,
        )
        if self._last is not None:
            self._last = (self._last[0], self._last[1] + num_correct)

    def observe_prompts(self, num_tokens: int) -> None:
        """Take in that prompts of so many tokens were read between two rounds.

        Their cost is `RoundCost`'s phase "prompt". Optional: without either, prompts
        are taken to cost nothing.
        """
        if not self.is_exploring:
            self._prompts.add_step(num_tokens)

    def describe(self) -> dict[str, object]:
        """Return the state behind the decisions, for people."""
        return {
            "exploring": self.is_exploring,
            "depth": self.depth,
            "price_tokens_per_s": round(self._price, 3),
            "probe_interval": self._probe_after,
        }

    def _count_last_round(self) -> None:
        if self._last is not None:
            plan, num_emitted = self._last
            self._prompts.add_round(num_emitted)
            self.profile.fade(plan.depth)

    def _plan(self, load: Load) -> RoundPlan:
        if load.num_drafting == 0:
            return RoundPlan(depth=0)
        if self.is_exploring:
            return self._explore(load)
        held = self._known.rates(load)
        rates = held.tokens_per_s
        self._move(load, rates)
        self._price = float(rates[self.depth])
        self._worth = max(1.0 - self._price * held.token_seconds, 0.0)
        self._since += 1
        shown = tuple(rates.tolist())
        if self.depth == 0 and self._since[-1] >= self._probe_after:
            return self._probe(load, shown)
        depth = self._look_aside(load, rates) if self.depth else 0
        self._since[slice(1, depth + 1) if depth else slice(1)] = 0
        return RoundPlan(
            depth=depth,
            draft_budget=int(held.draft_budgets[depth]),
            reason="rate" if depth == self.depth else "check",
            rates=shown,
        )

    def _explore(self, load: Load) -> RoundPlan:
        turn = self.num_explored
        self.num_explored += 1
        if turn % 2 and not self.cost.has_profile:
            return RoundPlan(depth=0, reason="exploring")
        each = _EXPLORED_BUDGETS[turn // 2 % len(_EXPLORED_BUDGETS)]
        budget = int(np.ceil(each * load.num_drafting))
        return RoundPlan(
            depth=self._max_depth,
            draft_budget=budget,
            least_budget=budget,
            reason="exploring",
        )

    def _move(self, load: Load, rates: Reals) -> None:
        """Change the depth once staying has cost what changing costs."""
        others = np.where(np.arange(len(rates)) == self.depth, -np.inf, rates)
        best = int(others.argmax())
        lead = float(np.log(rates[best] / rates[self.depth]))
        if lead <= 0 and self._score == 0:
            return
        enough = _ENOUGH
        if 0 in (best, self.depth):
            unread_s = self.cost.read_s(load, np.array([_UNREAD * load.num_drafting]))
            rounds = float(unread_s[0]) * float(rates[0]) / load.batch_size
            enough = max(enough, rounds)
        # In no fewer than two rounds: one of them may have been measured wrongly.
        self._score = max(0.0, self._score + min(lead, 0.5 * enough))
        if self._score >= enough:
            self.depth, self._score = best, 0.0
            self._since[:] = 0
            self._probe_after = self._affordable = self._probe_interval(load)

    def _look_aside(self, load: Load, rates: Reals) -> int:
        """Return the depth of this round, mostly that in use."""
        deepest, plain = self._max_depth, 0
        loss = 1.0 - float(rates[deepest]) / self._price
        if deepest != self.depth and self._since[deepest] >= _interval(loss):
            return deepest
        if self._since[plain] < _interval(1.0 - float(rates[plain]) / self._price):
            return self.depth
        # What is emitted without drafting, the draft reads later.
        read_s = self.cost.read_s(load, np.array([load.num_drafting]))
        time_s = load.batch_size / float(rates[plain]) + float(read_s[0])
        loss = 1.0 - load.batch_size / time_s / self._price
        return plain if self._since[plain] >= _interval(loss) else self.depth

    def _probe(self, load: Load, rates: tuple[float, ...]) -> RoundPlan:
        self._since[:] = 0
        self._affordable = self._probe_interval(load)
        requests = min(load.num_drafting, _PROBED_REQUESTS)
        return RoundPlan(
            depth=self._max_depth,
            num_drafting=requests,
            draft_budget=_PROBED_DRAFTS * requests,
            least_budget=_PROBED_DRAFTS * requests,
            reason="probe",
            rates=rates,
        )

    def _probe_interval(self, load: Load) -> int:
        """Return the rounds from probe to probe that what they cost allows."""
        requests = min(load.num_drafting, _PROBED_REQUESTS)
        time_s = self.cost.verify_s(load, np.array([_PROBED_DRAFTS * requests]))
        time_s += self.cost.read_s(load, np.array([_UNREAD * requests]))
        time_s += self.cost.steps_s(
            load, depth=self._max_depth, topk=self._topk, num_drafting=requests
        )
        return _interval(float(time_s[0]) / self.cost.undrafted_s(load) - 1.0)


def _interval(loss: float) -> int:
    """Return the rounds from one to the next that lose such a share of a round each."""
    return int(min(max(loss / _LOOKING, _LEAST_ROUNDS), _MOST_ROUNDS))
