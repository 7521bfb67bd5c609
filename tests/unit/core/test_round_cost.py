"""A round's cost is the sum of its parts; what was not measured costs nothing."""

from dataclasses import replace

import numpy as np
import pytest

from sglang_tetris.core.cost_table import CostTable
from sglang_tetris.core.round_cost import Load, RoundCost

LOAD = Load(batch_size=8, num_drafting=6, total_kv_tokens=2000, sampling="greedy")


def flat(ms: float, row_ms: float = 0.0) -> CostTable:
    """A part of so many milliseconds, and so many more per row."""
    rows = (1, 16384)
    times = tuple((ms + row_ms * n) / 1e3 for n in rows)
    return CostTable(token_knots=rows, knot_times_s=times)


PHASES = {
    "decode": flat(20, 0.5),
    "draft_step": flat(3, 0.01),
    "draft_extend": flat(4, 0.02),
    "outside": flat(1, 0.1),
    "sample_greedy": flat(0.5, 0.03),
    "sample_multinomial": flat(0.7, 0.2),
    "prompt": flat(15, 0.4),
}
PROFILE = replace(flat(25, 0.6), phases=PHASES)


def ms(seconds: object) -> float:
    return 1e3 * float(np.ravel(seconds)[0])


def test_the_parts_add_up():
    cost = RoundCost(PROFILE)
    drafts = np.array([10])
    assert ms(cost.undrafted_s(LOAD)) == pytest.approx(
        (1 + 0.8) + (20 + 4) + (0.5 + 0.24), rel=0.02
    )
    assert ms(cost.verify_s(LOAD, drafts)) == pytest.approx(
        (1 + 0.8) + (25 + 0.6 * 18) + (0.5 + 0.03 * 18), rel=0.02
    )
    # Three steps of 6 * 2 rows.
    steps = cost.steps_s(LOAD, depth=np.array([4]), topk=2, num_drafting=6)
    assert ms(steps) == pytest.approx(3 * (3 + 0.12), rel=0.02)
    # The draft reads what its own 6 of 8 requests emitted.
    assert ms(cost.emitted_s(LOAD, np.array([12]))) == pytest.approx(
        4 + 0.02 * 9, rel=0.02
    )
    assert ms(cost.prompt_s(np.array([50]), is_read=False)) == pytest.approx(
        15 + 20, rel=0.02
    )
    assert ms(cost.prompt_s(np.array([50]), is_read=True)) == pytest.approx(
        15 + 20 + 4 + 1, rel=0.02
    )


def test_sampling_looks_at_verified_rows_or_at_emitted_tokens():
    cost = RoundCost(PROFILE)
    sampled = replace(LOAD, sampling="multinomial")
    few, many = (cost.verify_s(sampled, np.array([n])) for n in (0, 100))
    assert ms(many) - ms(few) == pytest.approx(60, rel=0.02), "verify rows alone"
    few, many = (cost.emitted_s(sampled, np.array([n])) for n in (8, 108))
    assert ms(many) - ms(few) == pytest.approx(100 * (0.2 + 0.02 * 0.75), rel=0.02)
    few, many = (cost.verify_s(LOAD, np.array([n])) for n in (0, 100))
    assert ms(many) - ms(few) == pytest.approx(60 + 3, rel=0.02)


def test_what_was_not_measured_costs_nothing():
    cost = RoundCost()
    size = {"tokens": 8, "batch_size": 8, "total_kv_tokens": 2000}
    cost.observe("decode", **size, time_s=20e-3)
    assert ms(cost.undrafted_s(LOAD)) == pytest.approx(20, rel=0.01)
    assert ms(cost.emitted_s(LOAD, np.array([12]))) == 0
    assert ms(cost.prompt_s(np.array([50]), is_read=True)) == 0
    assert ms(cost.steps_s(LOAD, depth=4, topk=2, num_drafting=6)) == 0


def test_rounds_of_both_kinds_are_counted():
    cost = RoundCost()
    assert not cost.has_profile
    assert RoundCost(PROFILE).has_profile
    size = {"tokens": 8, "batch_size": 8, "total_kv_tokens": 0}
    for _ in range(3):
        cost.observe("decode", **size, time_s=20e-3)
    cost.observe("verify", **size, time_s=25e-3)
    cost.observe("draft_extend", **size, time_s=1e-3)
    assert cost.num_measured(drafted=False) == 3
    assert cost.num_measured(drafted=True) == 1


def test_a_phase_that_is_none_is_refused():
    with pytest.raises(KeyError, match="lunch"):
        RoundCost().observe(
            "lunch", tokens=1, batch_size=1, total_kv_tokens=0, time_s=1.0
        )


def test_the_table_can_be_the_profile_of_the_next_server():
    table = RoundCost(PROFILE).table()
    assert set(table.phases) == set(PHASES)
    again = RoundCost(CostTable.from_json(table.to_json()))
    assert ms(again.undrafted_s(LOAD)) == pytest.approx(
        ms(RoundCost(PROFILE).undrafted_s(LOAD)), rel=0.02
    )
