"""The times of a round's parts, added up by hand."""

from dataclasses import replace

import numpy as np
import pytest

from sglang_tetris.core.round_cost import Load
from sglang_tetris.simulator.clock import Clock, noisy, total_s
from tests.unit.simulator.worlds import TABLE, flat

LOAD = Load(batch_size=4, num_drafting=4, total_kv_tokens=100, sampling="multinomial")
SAMPLED = replace(
    TABLE,
    phases={
        **TABLE.phases,
        "sample_greedy": flat(0, 0.1),
        "sample_multinomial": flat(0, 0.5),
    },
)


def drafted_ms(clock: Clock, load: Load = LOAD, **changed: int) -> float:
    size = {"depth": 3, "topk": 2, "num_drafting": 4, "extended": 6}
    size |= {"num_drafts": 5, "num_correct": 2}
    return 1e3 * total_s(clock.drafted(load, **(size | changed)))


def test_a_round_is_the_sum_of_its_parts():
    clock = Clock(TABLE)
    assert 1e3 * total_s(clock.undrafted(LOAD)) == pytest.approx(1 + 10 + 4)
    assert drafted_ms(clock) == pytest.approx(1 + 2 + 2 * 3 + 20 + 9)
    assert drafted_ms(clock, depth=1) == pytest.approx(1 + 2 + 20 + 9)
    # A draft that has nothing to read is not run.
    assert drafted_ms(clock, extended=0) == pytest.approx(1 + 2 * 3 + 20 + 9)


def test_sampling_looks_at_all_rows_if_greedy_else_at_the_path():
    clock = Clock(SAMPLED)
    rest = 1 + 2 + 6 + 20 + 9
    assert drafted_ms(clock) == pytest.approx(rest + 0.5 * 6)
    greedy = replace(LOAD, sampling="greedy")
    assert drafted_ms(clock, greedy) == pytest.approx(rest + 0.1 * 9)
    assert 1e3 * total_s(clock.undrafted(LOAD)) == pytest.approx(15 + 0.5 * 4)


def test_text_and_requests_cost_and_rows_beyond_the_first_4096_too():
    table = replace(flat(1, 1), per_request_s=1e-3, per_kv_token_s=1e-5)
    part = Clock(table).parts(LOAD, ("verify", 9000, 1))[0]
    assert 1e3 * part.time_s == pytest.approx(1 + 9000 + 4 + 1)


def test_without_their_own_tables_decode_and_prompts_cost_a_verify():
    clock = Clock(flat(20, 1))
    assert 1e3 * total_s(clock.undrafted(LOAD)) == pytest.approx(24)
    assert [part.phase for part in clock.parts(LOAD, ("prompt", 7, 1))] == ["prompt"]


def test_measured_times_are_near_the_true_ones_and_a_few_far_above():
    """4,000 steps: the median is good to 0.2 %, 1 % of outliers to 0.5 % (3 sigma)."""
    parts = Clock(TABLE).parts(LOAD, *[("verify", 4, 1)] * 4000)
    times = np.array([part.time_s for part in noisy(parts, np.random.default_rng(0))])
    relative = times / parts[0].time_s
    assert np.median(relative) == pytest.approx(1, abs=0.002)
    assert 0.02 < relative[relative < 1.2].std() < 0.04
    assert 0.005 < (relative > 1.2).mean() < 0.015
    assert parts[0].time_s == pytest.approx(24e-3), "the true time stays as it is"
