"""Who gets drafts: by survival, priority, lateness, floors and caps, and how many."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("sglang")

from sglang_tetris.adapter import reserve, service_levels
from sglang_tetris.adapter.allocation import allocate, verify_plan
from sglang_tetris.adapter.rank_agreement import RankAgreement
from sglang_tetris.adapter.request_settings import draft_caps_host, settings_of
from sglang_tetris.adapter.round_clock import Lap
from sglang_tetris.adapter.round_planner import RoundPlanner
from sglang_tetris.adapter.round_view import RoundView
from sglang_tetris.adapter.service_levels import ServiceLevels
from sglang_tetris.core import CostTable, DraftTrees, path_survival
from sglang_tetris.core.auto_policy import Load
from sglang_tetris.core.config import TetrisConfig, parse_budget
from tests.reference.forests import trees_of
from tests.unit.adapter.records import finished
from tests.unit.adapter.upstream_objects import request

AGREEMENT = RankAgreement(SimpleNamespace(world_size=1, rank_in_group=0))
# Request 0's chain is worth 0.9, 0.72, 0.58; request 1's 0.5, 0.4, 0.32.
TREES = trees_of(
    [(1, -1, 0.9), (2, 0, 0.8), (3, 1, 0.8)],
    [(4, -1, 0.5), (5, 0, 0.8), (6, 1, 0.8)],
)
LOAD = Load(batch_size=2, num_drafting=2, total_kv_tokens=50)


@pytest.fixture(autouse=True)
def _full_reserve_afterwards():
    yield
    reserve.next_round_is_plain(False)


def planner(budget: str, **settings: object) -> RoundPlanner:
    return RoundPlanner(
        parse_budget(budget), num_steps=3, topk=1, agreement=AGREEMENT, **settings
    )


def view_of(reqs: list, config: TetrisConfig, high_first: bool = True) -> RoundView:
    settings = [settings_of(req, config, high_first) for req in reqs]
    return RoundView(
        settings=settings,
        caps=draft_caps_host(reqs, settings, TREES.max_nodes),
        pool_rows=[0, 1],
        seq_lens=[5, 6],
        load=LOAD,
    )


def given(
    budget: str | RoundPlanner,
    reqs: list,
    config: TetrisConfig | None = None,
    *,
    high_first: bool = True,
    levels: ServiceLevels | None = None,
    trees: DraftTrees = TREES,
) -> list[int]:
    """Drafts that each request gets."""
    config = config or TetrisConfig()
    found, allocation = allocate(
        trees,
        view_of(reqs, config, high_first),
        reqs,
        planner(budget) if isinstance(budget, str) else budget,
        levels or ServiceLevels(AGREEMENT),
        config.min_drafts,
    )
    drafts = (allocation.verify_lens - 1).tolist()
    assert sum(drafts) <= found
    return drafts


def test_the_best_drafts_of_the_batch_get_the_budget() -> None:
    assert given("3", [request(), request()]) == [3, 0]
    assert given("4", [request(), request()]) == [3, 1]
    assert given("2x", [request(), request()]) == [3, 1]


@pytest.mark.parametrize(
    ("weight", "priority", "high_first", "drafts"),
    [
        (1.0, 5, True, [3, 0]),
        (2.0, 1, True, [1, 2]),
        (2.0, 2, True, [0, 3]),
        (2.0, 1, False, [3, 0]),
        (2.0, -1, False, [1, 2]),
    ],
)
def test_priority_weight_gives_drafts_to_the_higher_priority(
    weight: float, priority: int, high_first: bool, drafts: list[int]
) -> None:
    """Twice the worth: 1.0, 0.8, 0.64 against 0.9, 0.72, 0.58."""
    reqs = [request(), request(priority=priority)]
    config = TetrisConfig(priority_weight=weight)
    assert given("3", reqs, config, high_first=high_first) == drafts


def test_a_request_behind_its_target_gets_drafts(monkeypatch) -> None:
    now = [10.0]
    monkeypatch.setattr(service_levels.time, "perf_counter", lambda: now[0])
    target = {"custom_params": {"tetris": {"target_tpot_ms": 10}}}
    reqs = [request(**target), request(**target)]
    levels = ServiceLevels(AGREEMENT)
    assert given("3", reqs, levels=levels) == [3, 0], "nobody is late yet"
    now[0] += 0.1
    reqs[0].output_ids.extend([1] * 20)  # 5 ms per token
    reqs[1].output_ids.extend([1] * 5)  # 20 ms
    assert given("3", reqs, levels=levels) == [1, 2]
    now[0] += 10
    assert given("3", reqs, levels=levels) == [3, 0], "both are as late as can count"
    reqs[0].output_ids.extend([1] * 5000)
    assert given("3", reqs, levels=levels) == [0, 3]


def test_the_floor_comes_before_the_best() -> None:
    reqs = [request(), request()]
    for floor, drafts in ((0, [3, 0]), (1, [2, 1]), (2, [2, 1]), (3, [3, 0])):
        config = TetrisConfig(min_drafts=floor)
        assert given("3", reqs, config) == drafts, floor
    assert given("4", reqs, TetrisConfig(min_drafts=2)) == [2, 2]


def test_a_floor_is_no_more_than_a_request_may_use() -> None:
    none = {"custom_params": {"tetris": {"max_drafts": 0}}}
    config = TetrisConfig(min_drafts=2)
    assert given("4", [request(), request(**none)], config) == [3, 0]
    last = request(output=(1,), max_new_tokens=3)
    assert given("4", [request(), last], config) == [3, 1]


def test_what_one_request_cannot_use_goes_to_the_others() -> None:
    few = {"custom_params": {"tetris": {"max_drafts": 1}}}
    assert given("3", [request(**few), request()]) == [1, 2]


def test_floors_hold_under_weights() -> None:
    reqs = [request(), request(priority=3)]
    config = TetrisConfig(priority_weight=2.0)
    assert given("3", reqs, config) == [0, 3]
    floored = dataclasses.replace(config, min_drafts=1)
    assert given("3", reqs, floored) == [1, 2]


def test_a_round_without_drafts_asks_for_no_weights() -> None:
    nothing = trees_of([], [])
    config = TetrisConfig(priority_weight=2.0)
    reqs = [request(), request(priority=3)]
    assert given("3", reqs, config, trees=nothing) == [0, 0]


def test_the_plan_has_the_rows_of_what_was_given() -> None:
    reqs = [request(), request()]
    config = TetrisConfig()
    _, allocation = allocate(
        *(TREES, view_of(reqs, config), reqs, planner("4")),
        *(ServiceLevels(AGREEMENT), 0),
    )
    batch = SimpleNamespace(
        spec_info=SimpleNamespace(bonus_tokens=torch.tensor([8, 9], dtype=torch.int32)),
        seq_lens=torch.tensor([5, 6]),
    )
    plan = verify_plan(TREES, allocation, batch)
    assert plan.input_ids.tolist() == [8, 1, 2, 3, 9, 4]
    assert plan.positions.tolist() == [5, 6, 7, 8, 6, 7]


# Rows are dear: 2 ms each, beside 10 ms for a round.
ROWS_COST = CostTable(
    token_knots=(1, 101),
    knot_times_s=(12e-3, 212e-3),
    phases={
        "decode": CostTable(token_knots=(1,), knot_times_s=(12e-3,)),
        "draft_step": CostTable(token_knots=(1,), knot_times_s=(1e-5,)),
        "draft_extend": CostTable(token_knots=(1,), knot_times_s=(1e-5,)),
    },
)


def weighing(lagged: bool = False) -> RoundPlanner:
    """A planner under auto that knows its costs, and drafts to the full depth."""
    found = planner("auto", cost_table=ROWS_COST, lagged=lagged)
    sure = trees_of(*[[(1, -1, 0.95), (2, 0, 0.95), (3, 1, 0.95)]] * 2)
    for _ in range(40):
        found.next_round(LOAD)
        if found.plan.depth:
            done = finished(
                sure, [1, 2, 3, 9, 1, 2, 3, 9], budget=6, decided=found.plan
            )
        else:
            nothing = trees_of([], [])
            done = finished(nothing, [9, 9], budget=0, decided=found.plan)
        verified = [Lap("verify", 8, 2, 50, 26e-3)] if found.plan.depth else []
        found.observe(done, verified)
    assert not found.policy.is_exploring
    assert found.plan.depth == 3
    return found


EVERYTHING = torch.ones(2, 3, dtype=torch.bool)


def test_auto_verifies_more_where_weights_make_drafts_worth_it() -> None:
    """The last drafts are dear for what they are worth to a request like others."""
    found = weighing()
    values = path_survival(TREES)

    def wanted(weights: torch.Tensor) -> int:
        best_first = np.sort((values * weights[:, None]).numpy().ravel())[::-1]
        return found.policy.draft_budget(
            found.plan, LOAD, best_first.astype(np.float64)
        )

    budgets = {}
    for weights in ([1.0, 1.0], [1.0, 4.0], [4.0, 1.0], [0.1, 1.0], [0.1, 0.1]):
        worth = torch.tensor(weights)
        budgets[tuple(weights)] = found.draft_budget(TREES, LOAD, EVERYTHING, worth)
        assert budgets[tuple(weights)] == wanted(worth)
    alike = found.draft_budget(TREES, LOAD, EVERYTHING, None)
    assert budgets[1.0, 1.0] == alike
    assert 0 < alike < 6, "there must be drafts that do not pay"
    assert budgets[1.0, 4.0] > alike
    assert budgets[0.1, 1.0] < alike
    assert budgets[0.1, 0.1] == 0


def test_auto_counts_no_drafts_that_may_not_be_verified() -> None:
    found = weighing()
    only = EVERYTHING.clone()
    only[0] = False
    weights = torch.tensor([8.0, 8.0])
    assert found.draft_budget(TREES, LOAD, EVERYTHING, weights) == 6
    assert found.draft_budget(TREES, LOAD, only, weights) == 3
    assert found.draft_budget(TREES, LOAD, ~EVERYTHING, weights) == 0


def test_a_lagged_budget_looks_at_no_weights() -> None:
    """They depend on this round's clock, not on its drafts, but the rule is one."""
    found = weighing(lagged=True)
    for weights in (None, torch.tensor([1.0, 8.0]), torch.tensor([0.1, 0.1])):
        budget = found.draft_budget(TREES, LOAD, EVERYTHING, weights)
        assert budget == found.plan.draft_budget


def test_allocation_under_auto_spends_what_the_weights_earned() -> None:
    """What was added for the priority goes to the request that has it."""
    config = TetrisConfig(priority_weight=2.0)
    found = weighing()
    plain = given(found, [request(), request()], config)
    urgent = given(found, [request(), request(priority=3)], config)
    assert sum(urgent) > sum(plain)
    assert urgent[1] == 3 > plain[1]
    # A cap leaves less to buy for: the others' drafts were not worth it before.
    capped = {"custom_params": {"tetris": {"max_drafts": 1}}}
    few = given(found, [request(), request(priority=3, **capped)], config)
    assert few[1] == 1
    assert few[0] <= plain[0]


def test_the_floor_holds_under_auto_where_no_draft_pays() -> None:
    """It is the user's word; what is not there, or may not be used, is not owed."""
    found = weighing()
    poor = trees_of([(1, -1, 0.01), (2, 0, 0.1), (3, 1, 0.1)], [(4, -1, 0.01)])
    reqs = [request(), request()]
    assert given(found, reqs, trees=poor) == [0, 0]
    assert given(found, reqs, TetrisConfig(min_drafts=1), trees=poor) == [1, 1]
    assert given(found, reqs, TetrisConfig(min_drafts=2), trees=poor) == [2, 1]
    none = request(custom_params={"tetris": {"max_drafts": 0}})
    assert given(found, [none, reqs[1]], TetrisConfig(min_drafts=2), trees=poor) == [
        0,
        1,
    ]
