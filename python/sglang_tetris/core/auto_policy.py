"""`--tetris-budget auto`: whether to draft, how deep, and how much to verify.

Two decisions, both by tokens per second (N requests, F expected correct drafts):

1. `plan_round`, before drafting, from earlier rounds only. For every depth d, with 0 =
   plain decoding, the best rate over all budgets B

       rate(d) = max over B of (N + F_d(B)) / time(d, B)

   from the survival of recent drafts and the measured cost of a round's parts. The
   depth in use is left only when others have been better for long enough: the log
   ratios of the rates are added up, and 10 % in sum is enough. A difference of 1 %
   takes ten rounds, one of 10 % two; a load that moves around a threshold adds nothing.
2. `draft_budget`, after drafting, whose cost is then spent: the B that maximises

       F(B) - price * T(N + B)

   price being the rate of the depth in use; F is the sum of the B best survivals
   (weighted, if requests have weights), and T has steps, so all B are looked at. For
   identical rounds this is the B of (N + F) / time.

What is not used cannot be judged, so now and then a round is spent on it: before
anything is known, rounds of both kinds take turns (`exploring`); while drafting, a
plain round and one of full depth take turns (`check`); while not drafting, a few
requests draft (`probe`), and some of it is verified whatever it is worth. Probes get
rarer while they find what was expected, and follow each other when they find more.

Under `rejection` verification the second decision must not look at this round's
drafts: `RoundPlan.draft_budget` is the first decision's own.

Not decided here: which drafts (core.allocator), and what is measured (the adapter).
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from sglang_tetris.core.round_cost import RoundCost, Sampling
from sglang_tetris.core.survival_profile import SurvivalProfile

Reals = npt.NDArray[np.float64]
Reason = Literal["exploring", "rate", "probe", "check"]

_ENOUGH = 0.10  # sum of log ratios that moves the depth
_MOST_PER_ROUND = 0.05  # one round's share of it
_FADING = 0.8  # what is left of the sum after a round in favour of the depth in use
_NUM_EXPLORED = 8  # rounds of either kind that are measured first
# Budgets of these rounds, per request: costs are learnt from rounds that differ.
_EXPLORED_BUDGETS = (2.0, 0.5, 1.0)
_PROBED_REQUESTS = 4
_PROBED_DRAFTS = 2  # per probed request, at least
_CHECK_INTERVAL = 128
_FIRST_INTERVAL, _LAST_INTERVAL, _SHORT_INTERVAL = 64, 1024, 4
# A depth this close to plain decoding is worth asking about often.
_CLOSE = 0.95
_ALL_BUDGETS_BELOW = 512
# Rates take a millisecond to compute and change slowly while the load stays.
_RATES_HOLD = 8
_SAME_KV = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """How the next round is to be run.

    depth         levels to draft, 0 = none: the target decodes plainly
    num_drafting  at most so many requests draft; None = all that may
    draft_budget  drafts to verify, judged by earlier rounds
    least_budget  drafts to verify at least, whatever they are worth
    reason        exploring, rate (the best is known), probe or check
    rates         tokens per second expected of each depth, 0 first; may be empty
    """

    depth: int
    num_drafting: int | None = None
    draft_budget: int = 0
    least_budget: int = 0
    reason: Reason = "rate"
    rates: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a round is run on: requests, those that may draft, cached tokens."""

    batch_size: int
    num_drafting: int
    total_kv_tokens: int
    sampling: Sampling = "greedy"


class AutoPolicy:
    """See the module. One per server; host values only, deterministic.

    cost       what rounds cost; its owner feeds it with measurements
    max_depth  levels that can be drafted
    topk       branches of a draft step

    num_explored counts the rounds planned to explore.
    """

    def __init__(self, cost: RoundCost, *, max_depth: int, topk: int) -> None:
        self.cost = cost
        self.profile = SurvivalProfile(max_depth)
        self.depth = 0
        self._max_depth, self._topk = max_depth, topk
        self._price = 0.0
        self._score = 0.0
        self.num_explored = 0
        self._since, self._interval = 0, _FIRST_INTERVAL
        self._num_checks = 0
        self._rated: tuple[Load, int, tuple[Reals, Reals]] | None = None

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
        if load.num_drafting == 0:
            return RoundPlan(depth=0)
        if self.is_exploring:
            return self._explore(load)
        rates, budgets = self._held_rates(load)
        self._move(rates)
        self._price = float(rates[self.depth])
        self._since += 1
        interval = self._interval if self.depth == 0 else _CHECK_INTERVAL
        looks_aside = self._since >= interval
        shown = tuple(rates.tolist())
        if not looks_aside:
            budget = int(budgets[self.depth])
            return RoundPlan(depth=self.depth, draft_budget=budget, rates=shown)
        self._since = 0
        if self.depth == 0:
            return self._probe(load, shown)
        self._num_checks += 1
        if self._num_checks % 2 or self.depth == self._max_depth:
            return RoundPlan(depth=0, reason="check", rates=shown)
        budget = int(budgets[self._max_depth])
        return RoundPlan(
            depth=self._max_depth, draft_budget=budget, reason="check", rates=shown
        )

    def rates(self, load: Load) -> tuple[Reals, Reals]:
        """Return the best tokens per second of each depth, and at which budget.

        `[max_depth + 1]` each, depth 0 first; -inf for depths nothing is known of.
        """
        rates = np.full(self._max_depth + 1, -np.inf)
        budgets = np.zeros(self._max_depth + 1)
        kv, sampling = load.total_kv_tokens, load.sampling
        rates[0] = load.batch_size / self.cost.undrafted_s(
            batch_size=load.batch_size, total_kv_tokens=kv, sampling=sampling
        )
        for depth in range(1, self._max_depth + 1):
            if not self.profile.is_known(depth):
                continue
            drafts, correct = self.profile.curve(depth, load.num_drafting)
            time_s = self.cost.after_draft_s(
                num_drafts=drafts,
                num_correct=correct,
                batch_size=load.batch_size,
                total_kv_tokens=kv,
                sampling=sampling,
            )
            share = load.num_drafting / load.batch_size
            # What is extended is what such a round emits, so it follows from itself.
            emitted = load.num_drafting + share * correct
            time_s = time_s + self.cost.draft_s(
                depth=depth,
                topk=self._topk,
                num_drafting=load.num_drafting,
                emitted=emitted,
                total_kv_tokens=kv,
            )
            rate = (load.batch_size + correct) / time_s
            best = int(rate.argmax())
            rates[depth], budgets[depth] = rate[best], np.ceil(drafts[best])
        return rates, budgets

    def draft_budget(self, plan: RoundPlan, load: Load, values: Reals) -> int:
        """Return how many drafts to verify, now that they are known.

        values  survivals of the drafts there are, best first (weighted, if requests
                have weights)
        """
        if plan.reason == "exploring":
            return min(plan.least_budget, len(values))
        if len(values) == 0:
            return 0
        correct = np.append(0.0, values.cumsum())
        drafts = _budgets(len(values))
        time_s = self.cost.after_draft_s(
            num_drafts=drafts,
            num_correct=correct[drafts],
            batch_size=load.batch_size,
            total_kv_tokens=load.total_kv_tokens,
            sampling=load.sampling,
        )
        best = int(drafts[(correct[drafts] - self._price * time_s).argmax()])
        return max(best, min(plan.least_budget, len(values)))

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
        self.profile.add(survival, depths, drafted_depth=plan.depth)
        if plan.reason != "probe":
            return
        # Two standard deviations of a sum of rare events, and at least two more.
        surprise = num_correct > num_expected + max(2.0, 2.0 * num_expected**0.5)
        close = bool(plan.rates) and max(plan.rates[1:]) > _CLOSE * plan.rates[0]
        if surprise:
            self._interval = _SHORT_INTERVAL
        elif close:
            self._interval = _FIRST_INTERVAL
        else:
            self._interval = min(
                max(2 * self._interval, _FIRST_INTERVAL), _LAST_INTERVAL
            )

    def describe(self) -> dict[str, object]:
        """Return the state behind the decisions, for people."""
        return {
            "exploring": self.is_exploring,
            "depth": self.depth,
            "price_tokens_per_s": round(self._price, 3),
            "probe_interval": self._interval,
        }

    def _held_rates(self, load: Load) -> tuple[Reals, Reals]:
        if self._rated is not None:
            seen, age, rated = self._rated
            grown = abs(load.total_kv_tokens - seen.total_kv_tokens)
            alike = replace(load, total_kv_tokens=seen.total_kv_tokens) == seen
            if alike and age < _RATES_HOLD and grown <= _SAME_KV * load.total_kv_tokens:
                self._rated = (seen, age + 1, rated)
                return rated
        self._rated = (load, 1, self.rates(load))
        return self._rated[2]

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

    def _move(self, rates: Reals) -> None:
        best = int(rates.argmax())
        if best == self.depth:
            self._score *= _FADING
            return
        if not np.isfinite(rates[self.depth]):
            self._score = _ENOUGH
        else:
            lead = float(np.log(rates[best] / rates[self.depth]))
            self._score += min(lead, _MOST_PER_ROUND)
        if self._score >= _ENOUGH:
            self.depth, self._score = best, 0.0
            self._since, self._interval = 0, _FIRST_INTERVAL

    def _probe(self, load: Load, rates: tuple[float, ...]) -> RoundPlan:
        requests = min(load.num_drafting, _PROBED_REQUESTS)
        return RoundPlan(
            depth=self._max_depth,
            num_drafting=requests,
            draft_budget=_PROBED_DRAFTS * requests,
            least_budget=_PROBED_DRAFTS * requests,
            reason="probe",
            rates=rates,
        )


def _budgets(most: int) -> npt.NDArray[np.int64]:
    """All budgets up to a bound, then ever coarser ones, `most` included."""
    if most < _ALL_BUDGETS_BELOW:
        return np.arange(most + 1)
    coarse = np.geomspace(_ALL_BUDGETS_BELOW, most, _ALL_BUDGETS_BELOW)
    return np.unique(
        np.concatenate([np.arange(_ALL_BUDGETS_BELOW), coarse.astype(np.int64), [most]])
    )
