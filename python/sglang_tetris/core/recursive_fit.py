"""A cost table that learns from every step, robustly, in constant memory.

The model is that of `CostTable`: a curve over tokens, piecewise linear with four knots
to an octave, plus so much per request and per token in the KV cache, all coefficients
at least 0. Samples fall into the segment of their token count, and each segment keeps
its own decayed sums, for each kind of step

    A_j = decay * A_j + w x x',   b_j = decay * b_j + w x y

so that what was learnt at one load is not forgotten at another. Errors are relative (x
and y are divided by the time), and outliers weigh less by Huber's rule; a segment's
first samples are held against each other (core.first_samples). Steps of
another kind (the target's verify beside its decode) share all that, and cost a constant
and so much per row more. What is asked for follows from

    minimise  c' (sum A_j + R) c - 2 c' sum b_j    over c >= 0

where R ties the slopes of neighbours, so that segments without samples go on as the
next ones do, and holds down what could as well be a constant (costs per request, KV
token, or row of another kind). A profile goes in as samples of its own, which never
fade but are few: it holds where nothing was measured and gives way where something is;
where it is far off, it weighs less by the same rule. Samples are taken in several at a
time, since the sums cost the same for many as for one.

Source: recursive least squares with forgetting and a Huber weight, as in any textbook
of system identification; the sums by segment are directional forgetting.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sglang_tetris.core.cost_table import CostTable, bucketed
from sglang_tetris.core.first_samples import FirstSamples
from sglang_tetris.core.robust_fit import nonnegative_quadratic

Reals = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64] | Reals

# Four to an octave, 1 to 16,384 rows: where a curve bends matters to a few per cent.
KNOTS = (
    *range(1, 8),
    *(quarter * 2**i for i in range(1, 12) for quarter in range(4, 8)),
    16384,
)
_KNOTS = np.array(KNOTS, np.float64)
_LENGTHS = np.diff(_KNOTS)
_OPEN_LENGTHS = np.append(_LENGTHS[:-1], np.inf)  # the last segment has no end
_NUM_COLUMNS = len(KNOTS) + 2  # base time, a slope per segment, request, KV token
_KIND_COLUMNS = 2  # constant, row
# A neighbour's slope counts like this share of one sample; more would bend real steps.
_TIE = 0.05
# A profile counts like so many samples at each knot, 13 in all, and is taken to be as
# good as this share of a time.
_PROFILE_SAMPLES, _PROFILE_SPREAD = 0.25, 0.2
_KNEE = 1.345  # Huber's, in spreads
# Relative error of a step on a quiet machine.
_LEAST_SPREAD = 0.01
_SHORTEST_S = 1e-9
# Samples are taken in together: at once where little is known, else so many at a time.
_BATCH = 32


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
        self._first: dict[tuple[int, ...], FirstSamples] = {}
        # Sums over all bins, kept up to date with them.
        self._all_squares = np.zeros((columns, columns))
        self._all_products = np.zeros(columns)
        self._all_weights = 0.0
        self._spread = 0.05
        self._coefficients = np.zeros(columns)
        self._is_solved = False
        self._curves: dict[int, Reals] = {}
        self._waiting: list[tuple[int, int, int, int, float]] = []
        self._edges = [() if p is None else p.bucket_edges for p in profiles]
        self.num_samples = 0
        points = [
            self._profile_points(profile, kind)
            for kind, profile in enumerate(profiles)
            if profile is not None
        ]
        # One row per point of a profile, as of a step, divided by its time.
        self._profile = np.vstack(points) if points else None

    @property
    def is_known(self) -> bool:
        """Whether there was a profile or a sample."""
        return self._all_weights > 0 or self._profile is not None

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
        self._waiting.append((kind, tokens, batch_size, total_kv_tokens, time_s))
        self.num_samples += 1
        known = self._weights[kind, bisect_right(KNOTS, max(tokens, 1)) - 1]
        if len(self._waiting) >= min(_BATCH, 1 + known):
            self._take_in()

    def times_s(
        self, *, tokens: Counts, batch_size: int, total_kv_tokens: int, kind: int = 0
    ) -> Reals:
        """Return the expected seconds of steps of one kind, for tokens of any shape.

        What the last few samples taught may not be in yet. RuntimeError before any.
        """
        curve = self._curve(kind)
        tokens = bucketed(tokens, self._edges[kind])
        times: Reals = np.interp(tokens, _KNOTS, curve)
        slope = (curve[-1] - curve[-2]) / _LENGTHS[-1]
        times += slope * np.maximum(tokens - _KNOTS[-1], 0)
        request, kv_token = self._coefficients[len(KNOTS) : _NUM_COLUMNS]
        times += request * batch_size + kv_token * total_kv_tokens
        return times

    def table(self, kind: int = 0) -> CostTable:
        """Return what is known of one kind as a table; RuntimeError before a sample."""
        curve = self._curve(kind)
        request, kv_token = self._coefficients[len(KNOTS) : _NUM_COLUMNS]
        return CostTable(
            token_knots=KNOTS,
            knot_times_s=tuple(curve.tolist()),
            per_request_s=float(request),
            per_kv_token_s=float(kv_token),
            bucket_edges=tuple(self._edges[kind]),
        )

    def _curve(self, kind: int) -> Reals:
        """Return the times at the knots, from up-to-date coefficients."""
        if not self.is_known:
            raise RuntimeError("a fit without samples has no table")
        if not self._is_solved:
            self._solve()
        if kind not in self._curves:
            solved = self._coefficients
            rises = np.append(0.0, solved[1 : len(KNOTS)] * _LENGTHS)
            times = solved[0] + rises.cumsum()
            if kind:
                at = _NUM_COLUMNS + _KIND_COLUMNS * (kind - 1)
                times += solved[at] + solved[at + 1] * _KNOTS
            self._curves[kind] = np.maximum(times, _SHORTEST_S)
        return self._curves[kind]

    def _take_in(self) -> None:
        """Add the samples that wait to the sums."""
        rows = np.array(self._waiting, np.float64)
        self._waiting = []
        kinds, tokens = rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64)
        features = self._features(kinds, tokens, rows[:, 2:4]) / rows[:, 4:]
        weights = np.ones(len(rows))
        if self.is_known:
            self._curve(0)
            errors = np.abs(1.0 / np.maximum(features @ self._coefficients, 1e-9) - 1.0)
            weights = np.array([self._weight(error) for error in errors.tolist()])
        places = kinds * len(KNOTS) + _segments(tokens)
        for place in np.unique(places).tolist():
            at, here = divmod(place, len(KNOTS)), places == place
            first = self._first.setdefault(at, FirstSamples())
            if first.is_full:
                self._add(features[here], weights[here], at, keep=self._decay)
                continue
            first.add(features[here], rows[here, 4])
            self._add(*first.weighed(weights[here][0]), at, keep=0.0)

    def _weight(self, error: float) -> float:
        """Return a sample's weight, and follow the usual size of the errors."""
        # The median of |error| would be 0.6745 sigma; followed by small steps.
        step = 0.05 if error > 0.6745 * self._spread else -0.05
        self._spread = max(self._spread * float(np.exp(step)), _LEAST_SPREAD)
        return min(1.0, _KNEE * self._spread / max(error, 1e-12))

    def _features(self, kinds: Counts, tokens: Counts, sizes: Reals) -> Reals:
        """Return each step's columns: what a unit of a coefficient adds to its time.

        kinds, tokens `[steps]`; sizes `[steps, 2]`, requests and KV tokens.
        """
        for kind, edges in enumerate(self._edges):
            if edges:
                tokens = np.where(kinds == kind, bucketed(tokens, edges), tokens)
        climbed = np.clip(tokens[:, None] - _KNOTS[:-1], 0, _OPEN_LENGTHS)
        features = [np.ones((len(tokens), 1)), climbed, sizes]
        for kind in range(1, self._num_kinds):
            ours = (kinds == kind)[:, None]
            features += [ours, ours * tokens[:, None]]
        return np.hstack(features)

    def _add(
        self, features: Reals, weights: Reals, at: tuple[int, int], *, keep: float
    ) -> None:
        """Add steps of one segment, in order; features divided by the times.

        keep  weight that earlier steps keep when one more arrives; 0 = these are all
        """
        count = len(weights)
        if keep:
            weights = weights * keep ** np.arange(count - 1, -1, -1)
        keep = keep**count
        weighted = features * weights[:, None]
        lost = 1.0 - keep
        squares = features.T @ weighted - lost * self._squares[at]
        products = weighted.sum(0) - lost * self._products[at]
        weight = float(weights.sum()) - lost * float(self._weights[at])
        self._squares[at] += squares
        self._products[at] += products
        self._weights[at] += weight
        self._all_squares += squares
        self._all_products += products
        self._all_weights += weight
        self._is_solved = False

    def _profile_points(self, profile: CostTable, kind: int) -> Reals:
        """Return a profile at every knot, at both ends of what it knows beside rows."""
        rows, sizes, times = [], [], []
        for knot in KNOTS:
            for batch_size, kv in ((1, 0), (knot, 0), (knot, 1000 * knot)):
                rows.append(knot)
                sizes.append((batch_size, kv))
                times.append(
                    profile.step_time_s(
                        total_verify_tokens=knot,
                        batch_size=batch_size,
                        total_kv_tokens=kv,
                    )
                )
        features = self._features(
            np.full(len(rows), kind), np.array(rows), np.array(sizes, np.float64)
        )
        relative: Reals = features / np.array(times)[:, None]
        return relative

    def _solve(self) -> None:
        squares, products = self._all_squares, self._all_products
        total = self._all_weights
        if self._profile is not None:
            points, errors = self._profile, np.zeros(len(self._profile))
            if self._coefficients.any():
                found = np.maximum(points @ self._coefficients, 1e-9)
                errors = np.maximum(found, 1.0 / found) - 1.0
            weights = _KNEE * _PROFILE_SPREAD / np.maximum(errors, 1e-12)
            weights = _PROFILE_SAMPLES / 3 * np.minimum(weights, 1.0)
            squares = squares + points.T @ (points * weights[:, None])
            products = products + weights @ points
            total += float(weights.sum())
        base = np.sqrt(squares[0, 0] / max(total, 1e-12))
        tie = np.zeros((len(KNOTS) - 2, len(squares)))
        row = np.arange(len(KNOTS) - 2)
        # base is 1 / time: a slope over its segment, relative to a usual step.
        tie[row, row + 1] = _LENGTHS[1:] * base * np.sqrt(_TIE)
        tie[row, row + 2] = -tie[row, row + 1]
        squares = squares + tie.T @ tie
        # Where nothing ever changes, what could be either is taken as a constant.
        sizes = np.arange(len(KNOTS), _NUM_COLUMNS)
        kind_rows = np.arange(_NUM_COLUMNS + 1, len(squares), _KIND_COLUMNS)
        varying = np.append(sizes, kind_rows)
        squares[varying, varying] *= 1.0 + _TIE / max(total, 1.0)
        scale = np.sqrt(np.maximum(np.diag(squares), 1e-30))
        normal = squares / np.outer(scale, scale)
        normal[np.diag_indices_from(normal)] += 1e-9
        linear = products / scale
        # What was above 0 will mostly be so again; at first all are tried.
        free = self._coefficients > 0
        solved = nonnegative_quadratic(normal, linear, free if free.any() else ~free)
        self._coefficients = solved / scale
        self._curves, self._is_solved = {}, True


def _segments(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.searchsorted(_KNOTS, np.maximum(tokens, 1), side="right") - 1
