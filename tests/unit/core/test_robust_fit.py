"""Non-negative least squares, against trying every set of coefficients held at 0."""

import itertools

import numpy as np
import pytest

from sglang_tetris.core.robust_fit import (
    nonnegative_least_squares,
    nonnegative_quadratic,
    robust_nonnegative,
)


def best_by_trying(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Of all sets of free columns, the best least-squares answer without a negative."""
    size = columns.shape[1]
    best, best_loss = np.zeros(size), float((target**2).sum())
    for count in range(1, size + 1):
        for free in itertools.combinations(range(size), count):
            trial = np.zeros(size)
            trial[list(free)] = np.linalg.lstsq(columns[:, free], target)[0]
            loss = float(((columns @ trial - target) ** 2).sum())
            if (trial >= 0).all() and loss < best_loss - 1e-12:
                best, best_loss = trial, loss
    return best


@pytest.mark.parametrize("seed", range(40))
def test_equals_trying_every_set(seed):
    """Columns lean on each other, so that freeing one drives others below 0."""
    rng = np.random.default_rng(seed)
    columns = rng.random((30, 5)) + 2 * rng.random((30, 1))
    target = columns @ rng.normal(size=5) + 0.1 * rng.normal(size=30)
    got = nonnegative_least_squares(columns, target)
    assert (got >= 0).all()
    assert got == pytest.approx(best_by_trying(columns, target), abs=1e-8)


@pytest.mark.parametrize("seed", range(10))
def test_a_few_wild_values_do_not_move_the_fit(seed):
    rng = np.random.default_rng(seed)
    columns = rng.random((100, 3))
    truth = np.array([1.0, 0.0, 2.0])
    target = columns @ truth + 1e-3 * rng.normal(size=100)
    target[rng.integers(0, 100, 5)] += 50
    got = robust_nonnegative(columns, target)
    assert got == pytest.approx(truth, abs=0.01)


@pytest.mark.parametrize("seed", range(40))
def test_the_quadratic_equals_trying_every_set(seed):
    """From any guess: all free, none free, and a wrong one."""
    rng = np.random.default_rng(seed)
    columns = rng.random((30, 5)) + 2 * rng.random((30, 1))
    target = columns @ rng.normal(size=5) + 0.1 * rng.normal(size=30)
    best = best_by_trying(columns, target)
    for free in (np.ones(5, bool), np.zeros(5, bool), best == 0, best > 0):
        got = nonnegative_quadratic(columns.T @ columns, columns.T @ target, free)
        assert (got >= 0).all()
        assert got == pytest.approx(best, abs=1e-6)


def test_the_guess_is_left_alone():
    free = np.zeros(2, bool)
    nonnegative_quadratic(np.eye(2), np.ones(2), free)
    assert not free.any()
