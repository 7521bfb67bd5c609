"""Robust least squares with coefficients that cannot be negative.

Times of steps are noisy on one side (a step that waited for something else is slow,
none is fast), so residuals beyond a knee count linearly, not squared: Huber's loss, the
knee following the median residual.
"""

import numpy as np
import numpy.typing as npt

Reals = npt.NDArray[np.float64]

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
