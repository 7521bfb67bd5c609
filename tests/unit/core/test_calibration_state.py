"""Saving and loading: exact, and nothing else is taken for a calibration."""

import json

import numpy as np
import pytest

from sglang_tetris.core import Calibrator, sampling_class
from tests.reference.calibration import random_labels


def trained(num_rounds=30, seed=0):
    rng = np.random.default_rng(seed)
    calibrator = Calibrator(half_life_rounds=7.5, prior_nodes=3.25)
    for _ in range(num_rounds):
        calibrator.update(*random_labels(rng, int(rng.integers(0, 9))))
    return calibrator


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("num_rounds", [0, 1, 30])
def test_round_trip(num_rounds):
    saved = trained(num_rounds)
    loaded = Calibrator.from_json(saved.to_json())
    assert loaded.to_json() == saved.to_json()
    assert np.array_equal(loaded._values, saved._values)
    assert np.array_equal(loaded._table, saved._table)
    assert loaded.describe() == saved.describe()
    assert (loaded.half_life_rounds, loaded.prior_nodes) == (7.5, 3.25)
    # And both go on alike.
    labels = random_labels(np.random.default_rng(9), 50)
    for calibrator in (saved, loaded):
        calibrator.update(*labels)
    assert np.array_equal(loaded._values, saved._values)
    assert loaded.to_json() == saved.to_json()


def test_classes_without_labels_take_no_room():
    calibrator = Calibrator()
    group = sampling_class(1.0, transformed=True)
    calibrator.update([0.5], [1], [0], [group], [True])
    assert list(json.loads(calibrator.to_json())["classes"]) == [
        "temperature_over_0.9_transformed"
    ]


def greedy_of(fields):
    return fields["classes"]["greedy"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.update(format="sglang_tetris.cost_table/1"), "format"),
        (lambda f: f.pop("format"), "format"),
        (lambda f: f.pop("num_rounds"), "lacks the key 'num_rounds'"),
        (lambda f: f.update(num_rounds=-1), "num_rounds .* -1"),
        (lambda f: f.update(num_rounds=1.5), r"num_rounds .* 1\.5"),
        (lambda f: f.update(half_life_rounds=0.0), r"half_life_rounds .* 0\.0"),
        (lambda f: f.update(prior_nodes=None), "wrong type"),
        (lambda f: f.update(extra=1), r"unknown keys \['extra'\]"),
        (lambda f: f.update(classes=[1]), r"calibration\.classes must be an object"),
        (lambda f: f["classes"].update(hot={}), r"classes has unknown keys \['hot'\]"),
        (lambda f: greedy_of(f).update(more=1), r"greedy has unknown keys \['more'\]"),
        (lambda f: greedy_of(f).pop("sums"), "lacks the key 'sums'"),
        (lambda f: f["classes"].update(greedy=3), "classes.greedy must be an object"),
        (lambda f: greedy_of(f).update(totals=[1.0]), r"totals .* shape \[4\]"),
        (lambda f: greedy_of(f)["sums"].pop(), r"sums .* shape \[3, 6, 3, 15\]"),
        (lambda f: greedy_of(f)["sums"][0][0].pop(), "sums must be numbers"),
        (lambda f: greedy_of(f).update(totals="abcd"), "totals must be numbers"),
        (
            lambda f: greedy_of(f)["totals"].__setitem__(1, -2.0),
            r"greedy\.totals must be finite and at least 0, got -2\.0",
        ),
        (
            lambda f: greedy_of(f)["totals"].__setitem__(1, float("nan")),
            r"greedy\.totals .* got nan",
        ),
        (
            lambda f: greedy_of(f)["sums"][2][0][0].__setitem__(3, 1e9),
            r"greedy\.sums must count no more correct nodes",
        ),
    ],
)
def test_what_is_not_a_calibration(change, message):
    fields = json.loads(trained().to_json())
    Calibrator.from_json(json.dumps(fields))
    change(fields)
    with pytest.raises(ValueError, match=message):
        Calibrator.from_json(json.dumps(fields))


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "3"])
def test_what_is_no_object(text):
    with pytest.raises(ValueError, match="calibration"):
        Calibrator.from_json(text)
