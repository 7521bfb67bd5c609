"""A cost table that learns from every step, robustly, in constant memory.

The model is that of `CostTable`: a curve over tokens, piecewise linear with knots at
powers of two, plus so much per request and per token in the KV cache, all coefficients
at least 0. Samples fall into the segment of their token count, and each segment keeps
its own decayed sums, for each kind of step

    A_j = decay * A_j + w x x',   b_j = decay * b_j + w x y

so that what was learnt at one load is not forgotten at another. Errors are relative (x
and y are divided by the time), outliers weigh less by Huber's rule, and segments
without samples continue their neighbours' slope. Steps of another kind (the target's
verify beside its decode) share all that, and cost a constant and so much per row more.
`table()` solves

    minimise  c' (sum A_j + R) c - 2 c' sum b_j    over c >= 0

with R the neighbours' tie. A profile goes in as samples of its own: it holds where
nothing was measured and gives way where something is.

Source: recursive least squares with forgetting and a Huber weight, as in any textbook
of system identification; the sums by segment are directional forgetting.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sglang_tetris.core.cost_table import CostTable
from sglang_tetris.core.robust_fit import nonnegative_least_squares

Reals = npt.NDArray[np.float64]

KNOTS = tuple(2**i for i in range(15))  # 1 to 16,384 rows
_NUM_COLUMNS = len(KNOTS) + 2  # base time, a slope per segment, request, KV token
_KIND_COLUMNS = 2  # constant, row
# A neighbour's slope counts like this share of one sample; more would bend real steps.
_TIE = 0.05
# A profile counts like this many samples at each of its points.
_PROFILE_SAMPLES = 4.0
# Relative error of a step on a quiet machine: the knee is never below its 1.345 fold.
_LEAST_SPREAD = 0.01
_SHORTEST_S = 1e-9
# Solving takes a millisecond: after the first samples, not for each one.
_SOLVE_EVERY = 8


class RecursiveFit:
    """The time of one part of a round as a function of its size; see the module.

    profiles      a measured table to start from, or None, for each kind of step; the
                  first kind is the one that the others are dearer than
    decay         weight that a segment's earlier samples keep when one more arrives
    """

    def __init__(
        self, profiles: Sequence[CostTable | None] = (None,), *, decay: float = 0.98
    ) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay must be in (0, 1), got {decay}")
        self._decay = decay
        self._num_kinds = len(profiles)
        bins = (len(profiles), len(KNOTS))
        columns = _NUM_COLUMNS + _KIND_COLUMNS * (len(profiles) - 1)
        self._squares = np.zeros((*bins, columns, columns))
        self._products = np.zeros((*bins, columns))
        self._weights = np.zeros(bins)
        self._spread = 0.05
        self._coefficients: Reals | None = None
        self._tables: dict[int, CostTable] = {}
        self._unsolved = 0
        self._edges = [() if p is None else p.bucket_edges for p in profiles]
        self.num_samples = 0
        for kind, profile in enumerate(profiles):
            if profile is not None:
                self._start_from(profile, kind)

    @property
    def is_known(self) -> bool:
        """Whether there was a profile or a sample."""
        return bool(self._weights.any())

    def update(
        self,
        *,
        tokens: int,
        batch_size: int,
        total_kv_tokens: int,
        time_s: float,
        kind: int = 0,
    ) -> None:
        """Take in one measured step; ValueError for a time that is not positive."""
        if not (0 < time_s < np.inf):
            raise ValueError(f"time_s must be positive and finite, got {time_s}")
        features = self._features(tokens, batch_size, total_kv_tokens, kind)
        weight = 1.0
        if self.num_samples:
            expected = float(features @ self._solved())
            error = abs(time_s / max(expected, _SHORTEST_S) - 1.0)
            # The median of |error| would be 0.6745 sigma; followed by small steps.
            step = 0.05 if error > 0.6745 * self._spread else -0.05
            self._spread = max(self._spread * np.exp(step), _LEAST_SPREAD)
            weight = min(1.0, 1.345 * self._spread / max(error, 1e-12))
        self._add(features, time_s, (kind, _segment(tokens)), weight)
        self.num_samples += 1

    def table(self, kind: int = 0) -> CostTable:
        """Return what is known of one kind as a table, at most a few samples old.

        Raises RuntimeError before the first sample.
        """
        if not self.is_known:
            raise RuntimeError("a fit without samples has no table")
        coefficients = self._solved()
        if kind not in self._tables:
            self._tables[kind] = self._as_table(coefficients, kind)
        return self._tables[kind]

    def _as_table(self, coefficients: Reals, kind: int) -> CostTable:
        knots = np.array(KNOTS, np.float64)
        rises = np.concatenate([[0.0], coefficients[1 : len(KNOTS)] * np.diff(knots)])
        times = coefficients[0] + rises.cumsum()
        if kind:
            at = _NUM_COLUMNS + _KIND_COLUMNS * (kind - 1)
            times += coefficients[at] + coefficients[at + 1] * knots
        return CostTable(
            token_knots=KNOTS,
            knot_times_s=tuple(np.maximum(times, _SHORTEST_S).tolist()),
            per_request_s=float(coefficients[len(KNOTS)]),
            per_kv_token_s=float(coefficients[len(KNOTS) + 1]),
            bucket_edges=self._edges[kind],
        )

    def _features(
        self, tokens: int, batch_size: int, total_kv_tokens: int, kind: int
    ) -> Reals:
        """A step's columns: what one unit of each coefficient adds to its time."""
        edges = self._edges[kind]
        tokens = next((edge for edge in edges if tokens <= edge), tokens)
        knots = np.array(KNOTS, np.float64)
        climbed = np.clip(tokens - knots[:-1], 0, np.diff(knots))
        climbed[-1] = max(tokens - knots[-2], 0)
        kinds = np.zeros(_KIND_COLUMNS * (self._num_kinds - 1))
        if kind:
            at = _KIND_COLUMNS * (kind - 1)
            kinds[at : at + _KIND_COLUMNS] = 1, tokens
        return np.concatenate([[1.0], climbed, [batch_size, total_kv_tokens], kinds])

    def _add(
        self, features: Reals, time_s: float, at: tuple[int, int], weight: float
    ) -> None:
        relative = features / time_s
        keep = self._decay
        self._squares[at] *= keep
        self._squares[at] += weight * np.outer(relative, relative)
        self._products[at] = keep * self._products[at] + weight * relative
        self._weights[at] = keep * self._weights[at] + weight
        self._unsolved += 1

    def _start_from(self, profile: CostTable, kind: int) -> None:
        for segment, knot in enumerate(KNOTS):
            # Both ends of what a profile knows beside the rows themselves.
            for batch_size, kv in ((1, 0), (knot, 0), (knot, 1000 * knot)):
                time_s = profile.step_time_s(
                    total_verify_tokens=knot, batch_size=batch_size, total_kv_tokens=kv
                )
                features = self._features(knot, batch_size, kv, kind)
                self._add(features, time_s, (kind, segment), _PROFILE_SAMPLES / 3)

    def _solved(self) -> Reals:
        fresh = self.num_samples > _SOLVE_EVERY and self._unsolved < _SOLVE_EVERY
        if self._coefficients is None or (self._unsolved and not fresh):
            squares = self._squares.sum((0, 1))
            base = np.sqrt(squares[0, 0] / max(self._weights.sum(), 1e-12))
            tie = np.zeros((len(KNOTS) - 2, len(squares)))
            row = np.arange(len(KNOTS) - 2)
            lengths = np.diff(np.array(KNOTS, np.float64))[1:]
            # base is 1 / time: a slope over its segment, relative to a usual step.
            tie[row, row + 1] = lengths * base * np.sqrt(_TIE)
            tie[row, row + 2] = -tie[row, row + 1]
            squares = squares + tie.T @ tie
            scale = np.sqrt(np.maximum(np.diag(squares), 1e-30))
            normal = squares / np.outer(scale, scale)
            normal[np.diag_indices_from(normal)] += 1e-9
            root = np.linalg.cholesky(normal)
            target = np.linalg.solve(root, self._products.sum((0, 1)) / scale)
            self._coefficients = nonnegative_least_squares(root.T, target) / scale
            self._tables, self._unsolved = {}, 0
        return self._coefficients


def _segment(tokens: int) -> int:
    return min(max(tokens, 1).bit_length() - 1, len(KNOTS) - 1)
