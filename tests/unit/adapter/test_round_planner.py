"""A fixed budget drafts fully or not at all; auto weighs, and says what it does."""

import pytest
import torch

pytest.importorskip("sglang")

from sglang_tetris.adapter import hooks, reserve
from sglang_tetris.adapter.rank_agreement import RankAgreement
from sglang_tetris.adapter.round_clock import Lap
from sglang_tetris.adapter.round_planner import RoundPlanner
from sglang_tetris.core import path_survival
from sglang_tetris.core.auto_policy import Load
from sglang_tetris.core.config import parse_budget
from tests.reference.forests import trees_of
from tests.unit.adapter.records import finished

LOAD = Load(batch_size=2, num_drafting=2, total_kv_tokens=50)
TREES = trees_of([(1, -1, 0.9), (2, 0, 0.9)], [(3, -1, 0.5), (4, 0, 0.5)])


class Alone:
    world_size, rank_in_group = 1, 0


def planner(budget: str, **settings) -> RoundPlanner:
    return RoundPlanner(
        parse_budget(budget),
        num_steps=2,
        topk=1,
        agreement=RankAgreement(Alone()),
        **settings,
    )


@pytest.fixture(autouse=True)
def _full_reserve_afterwards():
    yield
    reserve.next_round_is_plain(False)


@pytest.mark.parametrize(
    ("budget", "depth", "drafts"), [("0", 0, 0), ("3", 2, 3), ("2x", 2, 4)]
)
def test_a_fixed_budget(budget: str, depth: int, drafts: int) -> None:
    found = planner(budget)
    assert found.plan.depth == depth
    everything = torch.ones(2, 2, dtype=torch.bool)
    assert found.draft_budget(TREES, LOAD, everything, None) == drafts
    found.next_round(LOAD)
    assert found.plan.depth == depth


def test_the_reserve_follows_the_plan() -> None:
    planner("3")
    assert hooks.alloc_reserve(12) == 12
    found = planner("0")
    assert hooks.alloc_reserve(12) == 1, "plain decoding's own"
    assert not reserve.holds_drafts()
    found.use(parse_budget("3x"))
    assert hooks.alloc_reserve(12) == 12
    assert reserve.holds_drafts()


def test_auto_never_drafts_in_a_round_that_was_set_aside_for_none() -> None:
    """The first round under auto is plain: nothing was decided when it was prepared."""
    found = planner("3x")
    found.use(parse_budget("auto"))
    assert found.plan.depth == 0
    for _ in range(30):
        hooks.alloc_reserve(12)
        assert reserve.holds_drafts() or found.plan.depth == 0
        run(found, row_s=1e-7, correct=True, rounds=1)


def test_traces_can_draft_without_verifying() -> None:
    found = planner("0", draft_always=True)
    assert found.plan.depth == 2
    assert found.draft_budget(TREES, LOAD, torch.ones(2, 2).bool(), None) == 0


def run(found: RoundPlanner, *, row_s: float, correct: bool, rounds: int) -> None:
    """Rounds of a server on which a verified row takes `row_s`, a step next to none."""
    for _ in range(rounds):
        laps = [Lap("outside", 2, 2, 50, 1e-3)]
        if found.plan.depth:
            budget = found.draft_budget(TREES, LOAD, torch.ones(2, 2).bool(), None)
            laps += [
                Lap("draft_extend", 2, 2, 50, 1e-4),
                Lap("draft_step", 2, 2, 50, 1e-4),
                Lap("verify", 2 + budget, 2, 50, 1e-3 + row_s * (2 + budget)),
            ]
            tokens = [1, 2, 9, 9, 9, 9] if correct else [9] * 6
            done = finished(TREES, tokens, budget=4, decided=found.plan)
            found.observe(done, laps)
        else:
            laps += [Lap("decode", 2, 2, 50, 1e-3 + row_s * 2)]
            done = finished(trees_of([], []), [9, 9], budget=0, decided=found.plan)
            found.observe(done, laps)
        found.next_round(LOAD)


@pytest.mark.parametrize(("row_s", "drafts"), [(1e-7, True), (0.1, False)])
def test_auto_drafts_where_rows_are_cheap(row_s: float, drafts: bool, caplog) -> None:
    caplog.set_level("INFO")
    found = planner("auto")
    # What was seen little is hoped for a while to be better than it looks.
    run(found, row_s=row_s, correct=True, rounds=300)
    assert (found.policy.depth > 0) is drafts
    state = found.describe()
    assert state["exploring"] is False
    assert len(state["tokens_per_s"]) == 3
    assert "tokens/s expected by depth" in found.why()
    # A server without a profile says so, once, and once when it knows.
    assert caplog.text.count("no cost table was given") == 1
    assert caplog.text.count("what a round costs is known now") == 1


def test_what_is_measured_is_said_once_while_nobody_may_draft(caplog) -> None:
    caplog.set_level("INFO")
    found = planner("auto")
    nobody = Load(batch_size=2, num_drafting=0, total_kv_tokens=50)
    for load in (LOAD, *[nobody] * 5, LOAD):
        found.next_round(load)
    assert caplog.text.count("no cost table was given") == 1


@pytest.mark.parametrize("budget", ["0", "auto"])
@pytest.mark.parametrize("always_reads", [False, True])
def test_prompts_are_read_unless_nothing_is_drafted(budget, always_reads) -> None:
    found = planner(budget, always_reads=always_reads)
    assert found.plan.reads_prompts is (always_reads or budget == "auto")
    assert planner("3", always_reads=always_reads).plan.reads_prompts
    drafting = planner(budget, always_reads=always_reads, draft_always=True)
    assert drafting.plan.reads_prompts


def test_lagged_budgets_do_not_look_at_the_rounds_drafts() -> None:
    found = planner("auto", lagged=True)
    run(found, row_s=1e-7, correct=True, rounds=60)
    other = trees_of([(1, -1, 0.01), (2, 0, 0.01)], [(3, -1, 0.01), (4, 0, 0.01)])
    everything = torch.ones(2, 2, dtype=torch.bool)
    same = {found.draft_budget(t, LOAD, everything, None) for t in (TREES, other)}
    assert same == {found.plan.draft_budget}
    assert path_survival(TREES).sum() > path_survival(other).sum()


@pytest.mark.parametrize("budget", ["auto", "3"])
def test_prompts_between_rounds_take_from_what_drafting_yields(budget: str) -> None:
    """More tokens per round end more requests, and let more prompts in."""
    found = planner(budget)
    run(found, row_s=1e-7, correct=True, rounds=60)
    before = found.policy.rates(LOAD).tokens_per_s if found.is_auto else None
    for _ in range(40):
        prompt = [Lap("prompt", 100, 1, 100, 0.01), Lap("draft_extend", 100, 1, 100, 1)]
        found.observe(finished(trees_of([], []), [9, 9], budget=0), prompt)
        run(found, row_s=1e-7, correct=True, rounds=1)
    if before is None:
        assert found.policy.cost.num_measured(drafted=True) == 0, "nobody asks"
        return
    after = found.policy.rates(LOAD).tokens_per_s
    assert after[0] < 0.5 * before[0]
    assert after[2] / after[0] < before[2] / before[0]
