"""The policy of `auto`, run against servers whose costs and drafts are known.

`Bench` is a small server: it runs the policy's plans, and tells it the times, with 3 %
of noise, and the drafts' survival. Drafts are chains whose every level is correct with
the same probability given the one above. Seeds are fixed.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from sglang_tetris.core.auto_policy import AutoPolicy, Load, RoundPlan
from sglang_tetris.core.cost_table import CostTable
from sglang_tetris.core.round_cost import RoundCost
from tests.unit.core.test_round_cost import flat

# Milliseconds: rows nearly free, as on a GPU at low load; and dear, as at high load.
CHEAP_ROWS = replace(
    flat(20, 0.01),
    phases={
        "decode": flat(20, 0.01),
        "draft_step": flat(1),
        "draft_extend": flat(1, 0.01),
        "outside": flat(1),
    },
)
DEAR_ROWS = replace(
    flat(1, 1), phases={**CHEAP_ROWS.phases, "decode": flat(1, 1), "outside": flat(1)}
)


@dataclass
class Bench:
    """Runs rounds; `accept` is the share of drafts that are correct given the path.

    claimed is what the drafts' survival says instead, where it is not true.
    """

    table: CostTable
    accept: float
    claimed: float | None = None
    max_depth: int = 4
    noise: float = 0.03
    profile: CostTable | None = None
    seed: int = 0
    plans: list[RoundPlan] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    time_s: float = 0.0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.cost = RoundCost(self.profile)
        self.policy = AutoPolicy(self.cost, max_depth=self.max_depth, topk=1)

    def run(self, rounds: int, *sizes: int) -> "Bench":
        """Rounds of the given numbers of requests, in turn."""
        for number in range(rounds):
            self.round(sizes[number % len(sizes)])
        return self

    def round(self, requests: int) -> RoundPlan:
        load = Load(
            batch_size=requests, num_drafting=requests, total_kv_tokens=100 * requests
        )
        plan = self.policy.plan_round(load)
        self.plans.append(plan)
        drafting = 0
        if plan.depth:
            drafting = min(requests, plan.num_drafting or requests)
        budget = correct = 0
        parts = [("outside", requests, 1)]
        if drafting:
            parts.append(("draft_extend", drafting, 1))
            parts.append(("draft_step", drafting, plan.depth - 1))
            budget, correct = self.draft(plan, load, drafting)
            parts.append(("verify", requests + budget, 1))
        else:
            parts.append(("decode", requests, 1))
        self.verified.append(budget)
        self.tokens += requests + correct
        self.pay(parts, load)
        return plan

    def draft(self, plan: RoundPlan, load: Load, drafting: int) -> tuple[int, int]:
        claimed = self.accept if self.claimed is None else self.claimed
        survival = np.full((drafting, plan.depth), claimed, np.float32).cumprod(1)
        values = np.sort(survival.ravel())[::-1].astype(np.float64)
        budget = self.policy.draft_budget(plan, load, values)
        # Level by level, request by request: the order of survival.
        lens = np.full(drafting, budget // drafting)
        lens[: budget % drafting] += 1
        right = self.rng.random((drafting, plan.depth)) < self.accept
        correct = int(np.minimum(right.cumprod(1).sum(1), lens).sum())
        self.policy.observe_drafts(
            plan,
            survival,
            np.tile(np.arange(1, plan.depth + 1), (drafting, 1)),
            num_expected=float(values[:budget].sum()),
            num_correct=correct,
        )
        return budget, correct

    def pay(self, parts: list[tuple[str, int, int]], load: Load) -> None:
        for phase, tokens, count in parts:
            table = self.table if phase == "verify" else self.table.phases[phase]
            time_s = table.step_time_s(
                total_verify_tokens=tokens,
                batch_size=load.batch_size,
                total_kv_tokens=load.total_kv_tokens,
            )
            self.time_s += count * time_s
            if count:
                self.cost.observe(
                    phase,
                    tokens=tokens,
                    batch_size=load.batch_size,
                    total_kv_tokens=load.total_kv_tokens,
                    time_s=time_s * float(np.exp(self.rng.normal(0, self.noise))),
                )

    def speed(self, rounds: int, requests: int) -> float:
        """Tokens per second of so many further rounds."""
        begun_s, begun = self.time_s, self.tokens
        self.run(rounds, requests)
        return (self.tokens - begun) / (self.time_s - begun_s)

    def plain_speed(self, requests: int) -> float:
        rows = {"total_verify_tokens": requests, "batch_size": 1, "total_kv_tokens": 0}
        parts = (self.table.phases[name] for name in ("outside", "decode"))
        return requests / sum(part.step_time_s(**rows) for part in parts)


def depths(bench: Bench, reason: str = "rate") -> list[int]:
    return [plan.depth for plan in bench.plans if plan.reason == reason]


def test_it_drafts_where_rows_are_cheap_and_the_draft_is_good():
    bench = Bench(CHEAP_ROWS, accept=0.8).run(200, 4)
    assert set(depths(bench)[-100:]) == {4}
    assert bench.speed(300, 4) > 1.8 * bench.plain_speed(4)


def test_it_decodes_plainly_where_rows_are_dear():
    bench = Bench(DEAR_ROWS, accept=0.5).run(500, 32)
    assert set(depths(bench)[-100:]) == {0}
    assert bench.speed(1000, 32) > 0.99 * bench.plain_speed(32)


def test_without_a_profile_it_trims_within_100_rounds():
    """At a row's price the first three levels are worth it, the fourth is not."""
    verify = flat(20, 0.3)
    table = replace(verify, phases={**CHEAP_ROWS.phases, "decode": verify})
    bench = Bench(table, accept=0.7).run(100, 16)
    drafted = [
        (plan, count)
        for plan, count in zip(bench.plans, bench.verified, strict=True)
        if plan.reason == "rate" and plan.depth
    ]
    assert drafted, "drafting pays here"
    plan, count = drafted[-1]
    assert plan.depth >= 3
    assert 40 <= count <= 48
    assert all(rate > 0 for rate in plan.rates)


def test_exploring_measures_both_kinds_with_budgets_that_differ():
    bench = Bench(CHEAP_ROWS, accept=0.8).run(16, 4)
    assert {plan.reason for plan in bench.plans} == {"exploring"}
    assert [plan.depth for plan in bench.plans[:4]] == [4, 0, 4, 0]
    assert set(bench.verified) == {0, 2, 4, 8}
    bench.round(4)
    assert bench.plans[-1].reason == "rate"
    assert bench.policy.num_explored == 16


def test_with_a_profile_one_drafted_round_is_enough():
    bench = Bench(CHEAP_ROWS, accept=0.8, profile=CHEAP_ROWS).run(2, 4)
    assert [plan.reason for plan in bench.plans] == ["exploring", "rate"]


def test_a_profile_of_another_machine_gives_way():
    """The profile says that rows are free; here they are dear."""
    bench = Bench(DEAR_ROWS, accept=0.5, profile=CHEAP_ROWS).run(400, 32)
    assert set(depths(bench)[-100:]) == {0}


def test_a_load_around_a_threshold_does_not_flip_the_depth():
    """Beyond 12 rows they are dear: drafting pays at 7 requests, and not at 9."""
    knee = CostTable(token_knots=(1, 12, 200), knot_times_s=(20e-3, 20e-3, 160e-3))
    table = replace(knee, phases={**CHEAP_ROWS.phases, "decode": knee})
    for size, drafts in ((7, True), (9, False)):
        alone = Bench(table, accept=0.2, max_depth=2).run(400, size)
        assert (depths(alone)[-1] > 0) is drafts, "the sizes straddle the threshold"
    bench = Bench(table, accept=0.2, max_depth=2).run(600, 7, 8, 9)
    settled = np.array(depths(bench)[-400:])
    assert (np.diff(settled) != 0).sum() <= 8


def test_one_round_that_looks_otherwise_moves_nothing(monkeypatch):
    """It may have been measured wrongly; the next ones are believed."""
    bench = Bench(CHEAP_ROWS, accept=0.8).run(200, 4)
    found = bench.policy.rates(Load(batch_size=4, num_drafting=4, total_kv_tokens=400))
    plain, *others = found.tokens_per_s
    turned = replace(found, tokens_per_s=np.array([plain, *np.multiply(others, 0.01)]))
    monkeypatch.setattr(bench.policy._known, "rates", lambda load: turned)
    bench.round(4)
    assert bench.policy.depth == 4
    # A few, as what is enough is measured anew with every round.
    bench.run(3, 4)
    assert bench.policy.depth == 0


def test_a_draft_that_is_never_right_costs_next_to_nothing():
    bench = Bench(CHEAP_ROWS, accept=0.001).run(200, 8)
    assert bench.speed(4000, 8) > 0.99 * bench.plain_speed(8)
    assert set(depths(bench)[-1000:]) == {0}
    assert depths(bench, "probe"), "it is looked at now and then"


@pytest.mark.parametrize("requests", [1, 4, 16])
def test_drafts_that_are_never_what_they_claim_are_given_up(requests):
    """However sure they are, and with nothing that corrects their claims."""
    bench = Bench(CHEAP_ROWS, accept=0.001, claimed=0.7).run(40, requests)
    assert bench.speed(200, requests) > 0.95 * bench.plain_speed(requests)


def test_what_was_believed_of_drafts_while_exploring_is_not_held_on_to():
    """A calibrator knows after some rounds that they are worth little."""
    bench = Bench(CHEAP_ROWS, accept=0.001, claimed=0.7).run(16, 16)
    bench.claimed = 0.02
    bench.run(40, 1)
    assert sum(depth > 0 for depth in depths(bench)[-40:]) <= 4


@pytest.mark.parametrize("claimed", [0.5, 0.7, 0.9])
def test_drafts_that_are_better_than_they_claim_are_kept(claimed):
    bench = Bench(CHEAP_ROWS, accept=0.9, claimed=claimed).run(400, 4)
    assert depths(bench)[-1] >= 3


@pytest.mark.parametrize("seed", range(3))
def test_a_draft_that_becomes_good_is_noticed_within_some_hundred_rounds(seed):
    bench = Bench(CHEAP_ROWS, accept=0.01, seed=seed).run(1500, 8)
    assert depths(bench)[-1] == 0
    bench.accept = 0.8
    bench.run(600, 8)
    assert depths(bench)[-1] == 4


def test_a_draft_that_becomes_bad_is_left():
    bench = Bench(CHEAP_ROWS, accept=0.8).run(400, 8)
    bench.accept = 0.01
    bench.run(400, 8)
    # It is tried again now and then, as it was good for so long.
    assert bench.speed(600, 8) > 0.97 * bench.plain_speed(8)


def test_what_was_good_for_long_is_tried_again_ever_more_rarely():
    bench = Bench(CHEAP_ROWS, accept=0.8).run(400, 8)
    bench.accept = 0.01
    bench.run(1200, 8)
    tried = np.array(depths(bench)[400:]) > 0
    assert (np.diff(tried.astype(int)) == 1).any()
    first, *_, last = np.array_split(tried, 4)
    assert last.mean() < 0.3 < first.mean()


def test_surprises_are_followed_by_more_probes():
    bench = Bench(CHEAP_ROWS, accept=0.001).run(300, 8)
    interval = bench.policy.describe()["probe_interval"]
    assert isinstance(interval, int)
    assert interval > 16
    probe = replace(bench.plans[0], reason="probe", depth=4)
    survival = np.full((4, 4), 0.001, np.float32).cumprod(1)
    levels = np.tile(range(1, 5), (4, 1))
    for num_correct, expected in ((5, 4), (0, interval)):
        bench.policy.observe_drafts(
            probe, survival, levels, num_expected=0.1, num_correct=num_correct
        )
        assert bench.policy.describe()["probe_interval"] == expected


def test_looking_aside_is_rare_where_it_is_dear_and_never_stops():
    bench = Bench(CHEAP_ROWS, accept=0.8).run(4000, 8)
    plain = [i for i, plan in enumerate(bench.plans) if plan.reason == "check"]
    assert {bench.plans[i].depth for i in plain} == {0}
    # A plain round loses about two thirds of one: at most every 500th or so.
    assert 4 <= len(plain) <= 12


def test_the_plan_does_not_look_at_the_rounds_own_drafts():
    """Two servers with one past plan alike, whatever they are about to draft."""
    one, two = (Bench(CHEAP_ROWS, accept=0.6).run(150, 8) for _ in range(2))
    load = Load(batch_size=8, num_drafting=8, total_kv_tokens=800)
    plans = [bench.policy.plan_round(load) for bench in (one, two)]
    assert plans[0] == plans[1]
    assert plans[0].draft_budget > 0
    for values in (np.full(32, 0.99), np.full(32, 0.01)):
        one.policy.draft_budget(plans[0], load, values)
    assert one.policy.plan_round(load) == two.policy.plan_round(load)


def test_the_budget_is_the_best_of_all():
    bench = Bench(DEAR_ROWS, accept=0.9).run(200, 8)
    load = Load(batch_size=8, num_drafting=8, total_kv_tokens=800)
    plan = bench.policy.plan_round(load)
    price = bench.policy.describe()["price_tokens_per_s"]
    rng = np.random.default_rng(1)
    worth = 1 - price * bench.policy.rates(load).token_seconds
    for _ in range(20):
        values = np.sort(rng.random(40))[::-1]
        time_s = bench.cost.verify_s(load, np.arange(41))
        gain = worth * np.append(0, values.cumsum()) - price * time_s
        found = bench.policy.draft_budget(plan, load, values)
        # What is held from earlier rounds may differ in the last digits.
        assert gain[found] == pytest.approx(gain.max(), abs=0.02)


def test_edges_are_harmless():
    policy = AutoPolicy(RoundCost(), max_depth=3, topk=1)
    nobody = Load(batch_size=2, num_drafting=0, total_kv_tokens=0)
    assert policy.plan_round(nobody) == RoundPlan(depth=0)
    plan = RoundPlan(depth=3)
    some = replace(nobody, num_drafting=2)
    assert policy.draft_budget(plan, some, np.zeros(0)) == 0
    exploring = replace(plan, reason="exploring", least_budget=5)
    assert policy.draft_budget(exploring, some, np.ones(3)) == 3


def test_probes_verify_something_whatever_it_is_worth():
    bench = Bench(DEAR_ROWS, accept=0.05).run(3000, 8)
    probed = [
        (plan, count)
        for plan, count in zip(bench.plans, bench.verified, strict=True)
        if plan.reason == "probe"
    ]
    assert probed
    for plan, count in probed:
        assert plan.num_drafting == 4
        assert count == plan.least_budget == 8


@pytest.mark.parametrize("always_reads", [False, True])
def test_prompts_are_read_unless_plain_decoding_is_the_choice(always_reads) -> None:
    bench = Bench(DEAR_ROWS, accept=0.5)
    bench.policy = AutoPolicy(
        bench.cost, max_depth=4, topk=1, always_reads=always_reads
    )
    bench.run(2000, 16)
    seen = {(plan.reason, plan.depth > 0, plan.reads_prompts) for plan in bench.plans}
    assert ("exploring", False, True) in seen
    assert ("rate", False, always_reads) in seen
    assert ("probe", True, always_reads) in seen, "a probe is no change of mind"
    assert not always_reads or all(reads for *_, reads in seen)
    bench = Bench(CHEAP_ROWS, accept=0.8)
    bench.policy = AutoPolicy(
        bench.cost, max_depth=4, topk=1, always_reads=always_reads
    )
    bench.run(2000, 4)
    assert all(plan.reads_prompts for plan in bench.plans[20:])
    assert ("check", 0) in {(plan.reason, plan.depth) for plan in bench.plans}


@pytest.mark.parametrize("slow", [1, 2, 3])
def test_slow_first_rounds_do_not_make_it_shy(slow):
    """Else it never verifies enough again to see that many rows cost no more."""
    bench = Bench(CHEAP_ROWS, accept=0.8)
    quick, bench.table = (
        bench.table,
        replace(flat(90, 0.05), phases={**CHEAP_ROWS.phases, "decode": flat(90, 0.05)}),
    )
    bench.run(slow, 4)
    bench.table = quick
    bench.run(200, 4)
    assert bench.policy.depth == 4
    assert np.mean(bench.verified[100:]) > 14, "of 16"
