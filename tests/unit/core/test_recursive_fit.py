"""Costs learnt step by step: right, never falling, robust, and not forgotten."""

import numpy as np
import pytest

from sglang_tetris.core.cost_table import CostTable
from sglang_tetris.core.recursive_fit import KNOTS, RecursiveFit

TRUE = CostTable(
    token_knots=(1, 64, 1024),
    knot_times_s=(10e-3, 10e-3, 100e-3),
    per_kv_token_s=1e-7,
)


def time_s(table: CostTable, rows: int, batch_size: int = 8, kv: int = 1000) -> float:
    return table.step_time_s(
        total_verify_tokens=rows, batch_size=batch_size, total_kv_tokens=kv
    )


def teach(
    fit: RecursiveFit,
    table: CostTable,
    rows: list[int],
    *,
    rounds: int,
    seed: int = 0,
    noise: float = 0.03,
    outliers: float = 0.0,
    kind: int = 0,
) -> None:
    rng = np.random.default_rng(seed)
    for number in range(rounds):
        tokens = rows[number % len(rows)]
        measured = time_s(table, tokens) * float(np.exp(rng.normal(0, noise)))
        if rng.random() < outliers:
            measured *= 5
        fit.update(
            tokens=tokens,
            batch_size=8,
            total_kv_tokens=1000,
            time_s=measured,
            kind=kind,
        )


def learnt_s(fit: RecursiveFit, rows: int, kind: int = 0) -> float:
    found = fit.times_s(
        tokens=np.array([rows]), batch_size=8, total_kv_tokens=1000, kind=kind
    )
    return float(found[0])


def test_a_kinked_curve_is_learnt_within_100_rounds():
    """100 samples at 5 sizes, noise of 3 %: means are good to 0.7 %, 4 % is 6 sigma."""
    fit = RecursiveFit()
    sizes = [16, 48, 80, 160, 320]
    teach(fit, TRUE, sizes, rounds=100)
    for rows in sizes:
        assert learnt_s(fit, rows) == pytest.approx(time_s(TRUE, rows), rel=0.04)


def test_steps_that_waited_change_little():
    """One step in five takes 5 times as long: their mean would be 80 % off."""
    fit = RecursiveFit()
    teach(fit, TRUE, [64, 256], rounds=300, outliers=0.2)
    assert learnt_s(fit, 256) == pytest.approx(time_s(TRUE, 256), rel=0.025)


def test_what_was_learnt_at_one_load_outlives_another():
    fit = RecursiveFit()
    teach(fit, TRUE, [300], rounds=60, noise=0.01)
    before = learnt_s(fit, 300)
    teach(fit, TRUE, [4, 8], rounds=2000, noise=0.01)
    assert learnt_s(fit, 300) == pytest.approx(before, rel=0.02)


def test_a_change_is_followed():
    fit = RecursiveFit()
    teach(fit, TRUE, [64], rounds=200, noise=0.01)
    slower = CostTable(token_knots=(1,), knot_times_s=(30e-3,))
    teach(fit, slower, [64], rounds=400, noise=0.01)
    assert learnt_s(fit, 64) == pytest.approx(30e-3, rel=0.05)


def test_a_profile_holds_where_nothing_was_measured_and_gives_way_elsewhere():
    profile = CostTable(token_knots=(1, 1024), knot_times_s=(20e-3, 40e-3))
    fit = RecursiveFit((profile,))
    assert learnt_s(fit, 700) == pytest.approx(time_s(profile, 700), rel=0.03)
    teach(fit, TRUE, [32], rounds=200)
    assert learnt_s(fit, 32) == pytest.approx(10e-3, rel=0.05)
    assert learnt_s(fit, 8192) > 30e-3


def test_another_kind_costs_more_and_shares_the_curve():
    """Of kind 1 one size was seen: the others follow the first kind's curve."""
    fit = RecursiveFit((None, None))
    teach(fit, TRUE, [16, 64, 160, 320], rounds=200, noise=0.01)
    dearer = CostTable(
        token_knots=TRUE.token_knots,
        knot_times_s=tuple(t + 5e-3 for t in TRUE.knot_times_s),
        per_kv_token_s=1e-7,
    )
    teach(fit, dearer, [160], rounds=100, noise=0.01, kind=1)
    assert learnt_s(fit, 320, 1) == pytest.approx(time_s(dearer, 320), rel=0.05)
    assert learnt_s(fit, 320, 0) == pytest.approx(time_s(TRUE, 320), rel=0.03)


@pytest.mark.parametrize("seed", range(5))
def test_times_never_fall_in_rows_requests_or_text(seed):
    """Even where the measurements do: larger steps are made faster on purpose."""
    rng = np.random.default_rng(seed)
    fit = RecursiveFit((None, None))
    for _ in range(300):
        rows = int(rng.integers(1, 600))
        fit.update(
            tokens=rows,
            batch_size=int(rng.integers(1, 65)),
            total_kv_tokens=int(rng.integers(0, 50_000)),
            time_s=float(rng.uniform(0.5, 1.5)) / rows,
            kind=int(rng.integers(0, 2)),
        )
    rows = np.arange(1, 20_000, 7)
    for kind in (0, 1):
        small = fit.times_s(tokens=rows, batch_size=1, total_kv_tokens=0, kind=kind)
        assert (np.diff(small) >= 0).all()
        assert (small > 0).all()
        large = fit.times_s(tokens=rows, batch_size=9, total_kv_tokens=99, kind=kind)
        assert (large >= small).all()


def test_the_table_says_what_the_fit_says():
    edges = CostTable(
        token_knots=(1, 100), knot_times_s=(1e-3, 2e-3), bucket_edges=(8, 64)
    )
    fit = RecursiveFit((TRUE, edges))
    teach(fit, TRUE, [5, 70], rounds=40, kind=1)
    # Inside and outside the graphs, beyond the last knot too.
    rows = np.array([1, 5, 8, 9, 64, 65, 3000, KNOTS[-1] + 500])
    for kind in (0, 1):
        size = {"batch_size": 3, "total_kv_tokens": 700}
        expected = fit.table(kind).step_times_s(total_verify_tokens=rows, **size)
        found = fit.times_s(tokens=rows, **size, kind=kind)
        assert found == pytest.approx(expected, rel=1e-9)
    assert learnt_s(fit, 9, 1) == learnt_s(fit, 64, 1), "one captured graph"


@pytest.mark.parametrize("time_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused_and_changes_nothing(time_s):
    fit = RecursiveFit()
    with pytest.raises(ValueError, match="time_s"):
        fit.update(tokens=1, batch_size=1, total_kv_tokens=0, time_s=time_s)
    assert not fit.is_known
    with pytest.raises(RuntimeError, match="without samples"):
        fit.table()


def test_the_decay_is_a_share():
    with pytest.raises(ValueError, match="decay"):
        RecursiveFit(decay=1.0)


@pytest.mark.parametrize("slow", [(0,), (0, 1), (2,), (0, 3, 5)])
def test_a_servers_first_steps_may_be_slow(slow):
    """The rest are right: within 4 % of the truth, with noise of 3 %."""
    fit, rng = RecursiveFit(), np.random.default_rng(0)
    for number in range(12):
        rows = (48, 16, 32)[number % 3]
        measured = time_s(TRUE, rows) * float(np.exp(rng.normal(0, 0.03)))
        measured *= 4 if number in slow else 1
        fit.update(tokens=rows, batch_size=8, total_kv_tokens=1000, time_s=measured)
    for rows in (16, 32, 48, 64):
        assert learnt_s(fit, rows) == pytest.approx(time_s(TRUE, rows), rel=0.04)
