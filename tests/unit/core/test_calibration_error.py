"""Calibration error: unbiased where stated, finds what is planted, fair intervals."""

import math

import numpy as np
import pytest

from sglang_tetris.core import (
    bootstrap_interval,
    brier_score,
    debiased_calibration_error,
)


def calibrated_world(rng, size, shift=0.0):
    """Nodes that are accepted with their probability, then shown with a shift."""
    probs = rng.uniform(0.1, 0.85, size)
    return probs + shift, rng.random(size) < probs


def test_by_hand():
    # Two bins of three nodes: gaps 0.2 - 1/3 and 0.7 - 2/3.
    probs = [0.1, 0.2, 0.3, 0.6, 0.7, 0.8]
    correct = np.array([False, True, False, True, False, True])
    error = debiased_calibration_error(probs, correct, num_bins=2)
    residuals = np.array(probs) - correct
    squared, ece = 0.0, 0.0
    for part in (residuals[:3], residuals[3:]):
        gap, deviation = part.mean(), part.std(ddof=1) / math.sqrt(3)
        squared += 0.5 * (gap**2 - deviation**2)
        ratio = gap / deviation
        folded = deviation * math.sqrt(2 / math.pi) * math.exp(-(ratio**2) / 2)
        folded += gap * math.erf(ratio / math.sqrt(2))
        ece += 0.5 * (2 * abs(gap) - folded)
    assert error.squared == pytest.approx(squared)
    assert error.ece == pytest.approx(ece)
    assert error.plug_in_squared == pytest.approx((4 / 30) ** 2 / 2 + (1 / 30) ** 2 / 2)
    assert error.plug_in_ece == pytest.approx((4 / 30) / 2 + (1 / 30) / 2)
    assert error.rms == 0.0


def test_one_probability_per_bin_is_the_published_estimator():
    rng = np.random.default_rng(0)
    probs = np.repeat([0.2, 0.4, 0.8], 100)
    correct = rng.random(300) < probs**2
    want = 0.0
    for value in (0.2, 0.4, 0.8):
        own = correct[probs == value]
        rate = own.mean()
        bias = rate * (1 - rate) / (len(own) - 1)
        want += 1 / 3 * ((value - rate) ** 2 - bias)
    error = debiased_calibration_error(probs, correct, num_bins=3)
    assert error.squared == pytest.approx(want)


@pytest.mark.parametrize(("shift", "true"), [(0.0, 0.0), (0.1, 0.01)])
def test_the_square_is_unbiased(shift, true):
    """Mean of 2000 estimates from 600 nodes within 4 standard errors of the truth.

    False-alarm rate 6e-5 per case and seed. The plug-in estimate is off by far more.
    """
    rng = np.random.default_rng(1)
    errors = [
        debiased_calibration_error(*calibrated_world(rng, 600, shift))
        for _ in range(2000)
    ]
    squares = np.array([error.squared for error in errors])
    standard_error = squares.std() / math.sqrt(len(squares))
    assert abs(squares.mean() - true) < 4 * standard_error
    plugged = np.mean([error.plug_in_squared for error in errors])
    assert plugged - true > 20 * standard_error


def test_the_bias_of_ece_is_as_stated():
    """20,000 nodes, 15 bins: at most 0.47 standard deviations of a gap, 0.0056.

    300 estimates of standard deviation 0.0021: the mean's standard error is 0.00012,
    and the bounds lie more than 5 of them away. Plugged in, the bias is 0.009.
    """
    rng = np.random.default_rng(2)
    errors = [
        debiased_calibration_error(*calibrated_world(rng, 20_000)) for _ in range(300)
    ]
    mean = np.mean([error.ece for error in errors])
    assert 0.004 < mean < 0.0065
    assert np.mean([error.plug_in_ece for error in errors]) > 0.008


def test_a_planted_shift_is_found():
    """A shift of 0.1 over 20,000 nodes: deviation below 0.004, so > 5 of them."""
    world = calibrated_world(np.random.default_rng(3), 20_000, shift=0.1)
    error = debiased_calibration_error(*world)
    assert error.rms == pytest.approx(0.1, abs=0.02)
    assert error.ece == pytest.approx(0.1, abs=0.02)


def test_order_does_not_matter_even_with_ties():
    rng = np.random.default_rng(4)
    probs = rng.choice([0.1, 0.3, 0.31, 0.9], 200)
    correct = rng.random(200) < 0.5
    order = rng.permutation(200)
    one = debiased_calibration_error(probs, correct)
    other = debiased_calibration_error(probs[order], correct[order])
    assert one.squared == pytest.approx(other.squared, abs=1e-12)
    assert one.ece == pytest.approx(other.ece, abs=1e-12)


def test_certain_nodes():
    ones = np.ones(40)
    right = debiased_calibration_error(ones, ones.astype(bool))
    wrong = debiased_calibration_error(ones, np.zeros(40, bool))
    assert (right.squared, right.ece, wrong.squared, wrong.ece) == (0, 0, 1, 1)


def test_brier_score():
    assert brier_score([0.5, 1.0, 0.25], np.array([True, True, False])) == (
        pytest.approx((0.25 + 0 + 0.0625) / 3)
    )


def test_intervals_cover_the_truth():
    """100 intervals at 90 % of the squared error, each from 600 nodes.

    At a coverage of 0.9 fewer than 77 or all 100 have a probability below 1e-4 each.
    Without the plug-in term the intervals lie too high and cover 0.7.
    """
    rng, covered = np.random.default_rng(5), 0
    for _ in range(100):
        probs, correct = calibrated_world(rng, 600, shift=0.1)

        def error(rows, probs=probs, correct=correct):
            return debiased_calibration_error(probs[rows], correct[rows])

        low, high = bootstrap_interval(
            lambda rows, error=error: error(rows).squared,
            np.arange(600),
            plug_in=lambda rows, error=error: error(rows).plug_in_squared,
            level=0.9,
            num_resamples=100,
        )
        covered += low < 0.01 < high
    assert 77 <= covered < 100


def test_groups_are_resampled_whole():
    """40 requests of 50 equal nodes each hold 40 facts, not 2000."""
    rng = np.random.default_rng(6)
    correct = np.repeat(rng.random(40) < 0.5, 50)
    groups = np.repeat(rng.permutation(40), 50)
    wide = bootstrap_interval(lambda rows: correct[rows].mean(), groups)
    narrow = bootstrap_interval(lambda rows: correct[rows].mean(), np.arange(2000))
    ratio = (wide[1] - wide[0]) / (narrow[1] - narrow[0])
    assert 0.8 * math.sqrt(50) < ratio < 1.2 * math.sqrt(50)
    again = bootstrap_interval(lambda rows: correct[rows].mean(), groups)
    other = bootstrap_interval(lambda rows: correct[rows].mean(), groups, seed=1)
    assert wide == again != other
    assert wide[0] < correct.mean() < wide[1]


def test_debiasing_shifts_the_interval_down():
    probs, correct = calibrated_world(np.random.default_rng(7), 400)

    def error(rows):
        return debiased_calibration_error(probs[rows], correct[rows])

    low, high = bootstrap_interval(
        lambda rows: error(rows).squared,
        np.arange(400),
        plug_in=lambda rows: error(rows).plug_in_squared,
        num_resamples=200,
    )
    assert low < 0 < high


BOOLS = np.zeros(40, bool)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.5] * 39 + [float("nan")], BOOLS), r"probs .* got nan at \[39\]"),
        (([0.5] * 39 + [1.5], BOOLS), r"probs .* got 1.5 at \[39\]"),
        (([0.5] * 40, BOOLS.astype(int)), "correct must be bool, got int64"),
        (([0.5] * 40, BOOLS[1:]), r"one shape .* \[40\] and \[39\]"),
        (([0.5] * 29, BOOLS[:29]), "at least 2 nodes per bin, got 29 for 15"),
        (([0.5] * 40, BOOLS, 0), "num_bins must be at least 1, got 0"),
    ],
)
def test_arguments_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        debiased_calibration_error(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": []}, "groups"),
        ({"groups": [[1]]}, "groups"),
        ({"level": 1.0}, r"level .* 1\.0"),
        ({"num_resamples": 0}, "num_resamples .* 0"),
    ],
)
def test_intervals_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_interval(lambda rows: 0.0, **({"groups": [0, 1]} | options))


def test_brier_score_of_nothing():
    with pytest.raises(ValueError, match="at least 1 node"):
        brier_score([], np.zeros(0, bool))
