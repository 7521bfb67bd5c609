"""Robust least squares with coefficients that cannot be negative.

Times of steps are noisy on one side (a step that waited for something else is slow,
none is fast), so residuals beyond a knee count linearly, not squared: Huber's loss, the
knee following the median residual.
"""

import numpy as np
import numpy.typing as npt

Reals = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# Keeps divisions defined for a perfect fit; far below any time that can be measured.
_TINIEST = 1e-12


def robust_nonnegative(columns: Reals, target: Reals) -> Reals:
    """Return coefficients >= 0 that minimise the Huber loss of columns @ c - target.

    columns `[samples, coefficients]`, target `[samples]`. By reweighted least squares:
    at most 20 rounds, which is plenty where outliers are few.
    """
    scale = np.maximum(np.abs(columns).max(0), 1e-30)
    scaled = columns / scale
    weights = np.ones(len(target))
    solution = np.zeros(columns.shape[1])
    for _ in range(20):
        root = np.sqrt(weights)
        solution = nonnegative_least_squares(scaled * root[:, None], target * root)
        residual: Reals = np.abs(scaled @ solution - target)
        # 1.345 sigma: Huber's usual knee; the median residual is 0.6745 sigma.
        knee = max(1.345 * float(np.median(residual)) / 0.6745, _TINIEST)
        settled = weights
        weights = knee / np.maximum(residual, knee)
        if np.allclose(weights, settled, atol=1e-4):
            break
    unscaled: Reals = solution / scale
    return unscaled


def nonnegative_least_squares(columns: Reals, target: Reals) -> Reals:
    """Return the coefficients >= 0 of least squares: Lawson and Hanson, 1974."""
    size = columns.shape[1]
    solution = np.zeros(size)
    free = np.zeros(size, bool)
    tolerance = 1e-10 * max(float(np.abs(columns.T @ target).max()), 1e-30)
    for _ in range(3 * size):
        gain = columns.T @ (target - columns @ solution)
        gain[free] = -np.inf
        if gain.max() <= tolerance:
            break
        free[gain.argmax()] = True
        while True:
            trial = np.zeros(size)
            trial[free] = np.linalg.lstsq(columns[:, free], target, rcond=None)[0]
            negative = free & (trial < 0)
            if not negative.any():
                solution = trial
                break
            # Walk towards the trial until the first coefficient reaches 0; hold it.
            steps = np.full(size, np.inf)
            moved = solution[negative] - trial[negative]
            steps[negative] = solution[negative] / moved
            solution = solution + steps.min() * (trial - solution)
            free &= steps > steps.min()
            solution[~free] = 0
    return solution


def nonnegative_quadratic(normal: Reals, linear: Reals, free: Bools) -> Reals:
    """Return the x >= 0 that minimises x' normal x - 2 linear' x.

    normal `[n, n]` positive definite, linear `[n]`. `free` `[n]` says which x are
    expected above 0; a good guess, such as the last solution's, saves nearly all work.
    By block principal pivoting: solve for the free ones, then swap sides with all that
    came out wrong, or with the last of them alone while that makes no progress.
    Source: Portugal, Judice and Vicente, 1994.
    """
    size = len(linear)
    free = free.copy()
    scale = 1e-12 * max(float(np.abs(linear).max(initial=0.0)), 1e-300)
    fewest, patience = size + 1, 3
    solution = np.zeros(size)
    # Ends after a handful of rounds; the bound is for rounding that goes in circles.
    for _ in range(10 * size):
        solution = np.zeros(size)
        inside = np.flatnonzero(free)
        if len(inside):
            block = normal[np.ix_(inside, inside)]
            solution[inside] = np.linalg.solve(block, linear[inside])
        gradient = normal @ solution - linear
        wrong = np.where(free, solution < 0, gradient < -scale)
        count = int(wrong.sum())
        if count == 0:
            return solution
        if count < fewest:
            fewest, patience = count, 3
        elif patience:
            patience -= 1
        else:
            last = int(np.flatnonzero(wrong)[-1])
            wrong = np.arange(size) == last
        free ^= wrong
    return np.maximum(solution, 0.0)
