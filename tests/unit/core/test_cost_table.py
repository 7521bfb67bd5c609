"""CostTable: the stated formula, its JSON, and a fit that finds what made the data."""

import json

import numpy as np
import pytest

from sglang_tetris.core import CostSample, CostTable

TABLE = CostTable(
    token_knots=(4, 8, 16),
    knot_times_s=(1.0, 1.0, 3.0),
    per_request_s=0.5,
    per_kv_token_s=0.001,
)


def at(table, tokens, batch_size=0, kv=0):
    return table.step_time_s(
        total_verify_tokens=tokens, batch_size=batch_size, total_kv_tokens=kv
    )


@pytest.mark.parametrize(
    ("tokens", "time_s"),
    [(0, 1.0), (4, 1.0), (8, 1.0), (12, 2.0), (16, 3.0), (20, 4.0), (32, 7.0)],
)
def test_the_curve(tokens, time_s):
    assert at(TABLE, tokens) == pytest.approx(time_s)


def test_requests_and_kv_tokens_add_up():
    assert at(TABLE, 8, batch_size=3, kv=100) == pytest.approx(1.0 + 1.5 + 0.1)


def test_one_knot_is_a_constant():
    flat = CostTable(token_knots=(4,), knot_times_s=(2.0,))
    assert at(flat, 1) == at(flat, 400) == 2.0


def test_buckets_are_paid_for_whole():
    stepped = CostTable(
        token_knots=(0, 10), knot_times_s=(1.0, 11.0), bucket_edges=(4, 8)
    )
    assert [at(stepped, n) for n in (1, 4, 5, 8, 9, 12)] == [5, 5, 9, 9, 10, 13]


def test_never_falls():
    rng = np.random.default_rng(0)
    for _ in range(50):
        knots = np.unique(rng.integers(1, 200, 6))
        table = CostTable(
            token_knots=tuple(knots.tolist()),
            knot_times_s=tuple((0.1 + rng.random(len(knots)).cumsum()).tolist()),
            bucket_edges=tuple(np.unique(rng.integers(1, 200, 4)).tolist()),
        )
        times = [at(table, n) for n in range(260)]
        assert min(times) > 0
        assert (np.diff(times) >= -1e-12).all()


def test_json_round_trip():
    stepped = CostTable(
        token_knots=(1, 3), knot_times_s=(0.1, 0.2), bucket_edges=(2, 4)
    )
    for table in (TABLE, stepped):
        assert CostTable.from_json(table.to_json()) == table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "format"),
        ({"format": "other/1"}, "format"),
        ({"token_knots": None}, "wrong type"),
        ({"per_request_s": -1.0}, "per_request_s .* -1.0"),
        ({"extra": 1}, "extra"),
    ],
)
def test_bad_json(change, message):
    if isinstance(change, dict):
        change = json.dumps(json.loads(TABLE.to_json()) | change)
    with pytest.raises(ValueError, match=message):
        CostTable.from_json(change)


def test_a_missing_key():
    fields = json.loads(TABLE.to_json())
    del fields["knot_times_s"]
    with pytest.raises(ValueError, match="lacks the key 'knot_times_s'"):
        CostTable.from_json(json.dumps(fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_knots": (), "knot_times_s": ()}, "knot_times_s"),
        ({"token_knots": (1, 2), "knot_times_s": (1.0,)}, "knot_times_s .* 1 for 2"),
        (
            {"token_knots": (2, 2), "knot_times_s": (1.0, 2.0)},
            r"token_knots .*\(2, 2\)",
        ),
        ({"token_knots": (1, 2), "knot_times_s": (2.0, 1.0)}, "knot_times_s .* 1.0"),
        ({"token_knots": (1,), "knot_times_s": (0.0,)}, "knot_times_s .* 0.0"),
        ({"token_knots": (1,), "knot_times_s": (float("nan"),)}, "knot_times_s .* nan"),
        (
            {"token_knots": (1,), "knot_times_s": (1.0,), "bucket_edges": (4, 2)},
            r"bucket_edges .*\(4, 2\)",
        ),
        (
            {"token_knots": (1,), "knot_times_s": (1.0,), "per_kv_token_s": -2.0},
            "per_kv_token_s .* -2.0",
        ),
    ],
)
def test_bad_tables(fields, message):
    with pytest.raises(ValueError, match=message):
        CostTable(**fields)


def test_bad_sizes():
    with pytest.raises(ValueError, match=r"^total_verify_tokens must .* -1"):
        at(TABLE, -1)
    with pytest.raises(ValueError, match=r"^batch_size must .* -2"):
        at(TABLE, 1, batch_size=-2)


def true_time(tokens, batch_size, kv, kink=64):
    ramp = 2e-5 * max(tokens - kink, 0)
    return 1e-3 + 1e-5 * tokens + ramp + 2e-5 * batch_size + 1e-8 * kv


def grid():
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128):
        for batch_size in (1, 2, 4, 8):
            for kv in (100, 10_000, 50_000):
                if batch_size <= tokens:
                    yield tokens, batch_size, kv


def test_fit_finds_the_formula_that_made_the_samples():
    samples = [CostSample(*size, true_time(*size)) for size in grid()]
    table = CostTable.fit(samples)
    for size in [*grid(), (100, 4, 2_000), (200, 8, 2_000)]:
        assert at(table, *size) == pytest.approx(true_time(*size), rel=1e-6)


def test_fit_takes_mappings_and_plain_rows():
    rows = [(*size, true_time(*size)) for size in grid()]
    table = CostTable.fit(rows)
    assert CostTable.fit(iter(CostSample(*row)._asdict() for row in rows)) == table


def test_fit_is_not_led_by_stalls():
    """A tenth of the steps took 20 times as long; 5 % of noise on all."""
    rng = np.random.default_rng(0)
    samples = []
    for size in list(grid()) * 5:
        slow = 20 if rng.random() < 0.1 else 1
        noise = 1 + 0.05 * rng.standard_normal()
        samples.append((*size, true_time(*size) * noise * slow))
    table = CostTable.fit(samples)
    for size in grid():
        assert at(table, *size) == pytest.approx(true_time(*size), rel=0.15)


def test_fit_never_falls_even_where_the_samples_do():
    samples = [(n, 1, 0, 1.0 - 0.01 * n) for n in range(1, 30)]
    table = CostTable.fit(samples)
    assert (np.diff([at(table, n) for n in range(60)]) >= 0).all()


def test_fit_with_buckets():
    edges = (4, 8, 16)

    def stepped(tokens):
        return 1.0 + next(edge for edge in edges if edge >= tokens)

    samples = [(n, 1, 0, stepped(n)) for n in range(1, 17)]
    table = CostTable.fit(samples, bucket_edges=edges)
    assert [at(table, n, 1) for n in range(1, 17)] == pytest.approx(
        [stepped(n) for n in range(1, 17)]
    )


def test_fit_of_a_single_sample():
    assert at(CostTable.fit([(5, 2, 100, 0.25)]), 5, 2, 100) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "got none"),
        ([(1, 1, 1)], r"\(1, 1, 1\)"),
        ([(1, 1, 1, 0.0)], r"\(1, 1, 1, 0\.0\)"),
        ([(1, 1, -1, 0.5)], "-1"),
        ([(1, 1, 1, float("nan"))], "nan"),
        ([{"batch_size": 1}], "total_verify_tokens"),
    ],
)
def test_bad_samples(samples, message):
    with pytest.raises(ValueError, match=message):
        CostTable.fit(samples)
