"""The first samples of a place, weighed anew with each one that arrives.

A recursive fit weighs a sample once, by how far it is from what was expected. The very
first steps of a server are its slowest (caches are cold, other programs still start),
and what was expected then comes from one of them: the ordinary samples behind it would
look like the outliers. So the first few of each place are kept, and held against each
other: at most one half of them is slower than the lower median, and weighs less by
Huber's rule.

Not decided here: what a place is, and what the weights do (core.recursive_fit).
"""

import numpy as np
import numpy.typing as npt

Reals = npt.NDArray[np.float64]

NUM_FIRST = 8
_KNEE, _SPREAD = 1.345, 0.1


class FirstSamples:
    """Some `NUM_FIRST` samples of one place, each a row of columns and a time."""

    def __init__(self) -> None:
        self._rows: list[Reals] = []
        self._times: list[float] = []

    @property
    def is_full(self) -> bool:
        return len(self._rows) >= NUM_FIRST

    def add(self, rows: Reals, times_s: Reals) -> None:
        """Take in samples, `[samples, columns]` and `[samples]`."""
        self._rows += list(rows)
        self._times += times_s.tolist()

    def weighed(self, only: float) -> tuple[Reals, Reals]:
        """Return all rows, and their weights; `only` is that of a single one."""
        rows, times = np.array(self._rows), np.array(self._times)
        if len(times) == 1:
            return rows, np.array([only])
        usual = np.sort(times)[(len(times) - 1) // 2]
        errors = np.abs(times / usual - 1.0)
        return rows, np.minimum(1.0, _KNEE * _SPREAD / np.maximum(errors, 1e-12))
