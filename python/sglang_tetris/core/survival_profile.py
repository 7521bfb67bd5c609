"""What the next drafts will be worth, judged by the last ones.

Decayed histograms of survival for each depth, counted per drafting request: one of the
recent rounds, one of the long run. A depth's estimate is the recent mean, with the long
run counting like a few requests more, so that text which is easier than usual is
noticed, and what was not drafted lately goes back to what it usually is:

    estimate(d) = (recent(d) + 32 * usual(d)) / (requests(d) + 32)
    usual(d)    = estimate(d - 1) * longrun(d) / longrun(d - 1)

the last ratio over rounds that drafted both, since text that is easier at one depth is
easier at the next. What was hardly ever seen, or long ago, gets the benefit of the
doubt, up to a quarter, so that it is tried where that could change a decision, and only
there. From the estimates follows, for any depth d and R drafting requests, the curve

    num_drafts[i]   how many drafts of depth <= d have a survival in the best i bins
    num_correct[i]  the sum of their survivals

which is what the best `num_drafts[i]` drafts of a batch yield. Bins are equal in log
survival; a bin remembers the sum of its values.

Survivals are remembered as they were believed then, by a calibrator that may have known
nothing yet. So what was verified is remembered beside them, and where even two standard
deviations more than was correct would be less than was expected, all are scaled down to
that.
"""

import math

import numpy as np
import numpy.typing as npt

Reals = npt.NDArray[np.float64]

_NUM_BINS = 48
_LEAST = 1e-4
_STEP = -np.log(_LEAST) / (_NUM_BINS - 1)
# Requests: what the recent mean forgets in, and what the long run counts like in it.
_RECENT, _USUAL = 128, 32
# The long run forgets in so many requests, but not in fewer than so many rounds.
_LONG_RUN, _LONG_ROUNDS = 1024, 256
# Below so many requests in the long run there is a doubt; unused, it forgets slowly.
_ENOUGH, _DOUBT = 256, 0.25
_UNUSED_ROUNDS = 8192


class _Histogram:
    """Counts and sums of survival by depth and bin, and the requests behind them."""

    def __init__(self, max_depth: int) -> None:
        self.counts = np.zeros((max_depth, _NUM_BINS))
        self.sums = np.zeros((max_depth, _NUM_BINS))
        self.requests = np.zeros((max_depth, 1))

    def scale(self, depths: slice, keep: float) -> None:
        for total in (self.counts, self.sums, self.requests):
            total[depths] *= keep


class SurvivalProfile:
    """See the module; max_depth is the deepest level that is ever drafted."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self._recent = _Histogram(max_depth)
        self._long_run = _Histogram(max_depth)
        # The long run's sums of the depth above, from the rounds that drafted both.
        self._above = np.zeros(max_depth)
        # Of the verified drafts behind the recent mean.
        self._expected = self._correct = 0.0

    def add(
        self,
        survival: npt.NDArray[np.float32],
        depths: npt.NDArray[np.int64],
        *,
        drafted_depth: int,
        num_expected: float = 0.0,
        num_correct: int = 0,
    ) -> None:
        """Take in one round's trees, `[requests, nodes]`; depth 0 marks padding.

        num_expected  the sum of the verified drafts' survival; num_correct of them were
        """
        requests = survival.shape[0]
        if requests == 0 or drafted_depth == 0:
            return
        real = depths > 0
        values = survival[real].astype(np.float64)
        bins = (-np.log(np.maximum(values, _LEAST)) / _STEP).astype(np.int64)
        where = (depths[real] - 1) * _NUM_BINS + bins
        size = self.max_depth * _NUM_BINS
        counts = np.bincount(where, None, size).reshape(self.max_depth, _NUM_BINS)
        sums = np.bincount(where, values, size).reshape(self.max_depth, _NUM_BINS)
        top = slice(0, drafted_depth)
        keep_recent = max(0.5, 1.0 - requests / _RECENT)
        keep_long = max(1.0 - 1.0 / _LONG_ROUNDS, 1.0 - requests / _LONG_RUN)
        for histogram, keep in (
            (self._recent, keep_recent),
            (self._long_run, keep_long),
        ):
            histogram.scale(top, keep)
            histogram.counts += counts
            histogram.sums += sums
            histogram.requests[top] += requests
        self._expected = keep_recent * self._expected + num_expected
        self._correct = keep_recent * self._correct + num_correct
        above = np.append(requests, sums.sum(1)[:-1])
        self._above[top] = keep_long * self._above[top] + above[top]

    def fade(self, depth: int) -> None:
        """Count a round in which nothing deeper than `depth` was drafted."""
        below = slice(depth, None)
        keep = 1.0 - 1.0 / _RECENT
        self._recent.scale(below, keep)
        if depth == 0:
            self._expected, self._correct = keep * self._expected, keep * self._correct
        self._long_run.scale(below, 1.0 - 1.0 / _UNUSED_ROUNDS)
        self._above[below] *= 1.0 - 1.0 / _UNUSED_ROUNDS

    def correct_per_request(self) -> float:
        """Return what all drafts of a request are worth together in the long run."""
        longest = np.maximum(self._long_run.requests, 1e-12)
        return float((self._long_run.sums / longest).sum())

    def is_known(self, depth: int) -> bool:
        """Whether anything of that depth was ever drafted."""
        return bool(self._long_run.requests[depth - 1, 0] > 0)

    def curves(self, num_drafting: int) -> tuple[Reals, Reals]:
        """Return (num_drafts, num_correct) of `num_drafting` trees of every depth.

        `[max_depth, points]`, depth 1 first. Rows start with 0 and never fall; reals,
        since they are means over rounds. Those of a depth that is not known mean
        nothing.
        """
        recent, long_run = self._recent, self._long_run
        remembered = np.maximum(long_run.requests, 1e-12)
        usual_counts = long_run.counts / remembered
        usual_sums = long_run.sums / remembered
        weight = recent.requests + _USUAL
        counts = (recent.counts + _USUAL * usual_counts) / weight
        found, longest = recent.sums.sum(1), usual_sums.sum(1)
        estimate = 1.0
        for depth in range(self.max_depth):
            kept_on = long_run.sums[depth].sum() / max(self._above[depth], 1e-12)
            usual = estimate * float(kept_on)
            usual_sums[depth] *= usual / max(float(longest[depth]), 1e-12)
            estimate = float(found[depth] + _USUAL * usual) / float(weight[depth, 0])
        sums = (recent.sums + _USUAL * usual_sums) / weight
        sums *= 1.0 + _DOUBT * (1.0 - np.minimum(remembered / _ENOUGH, 1.0))
        sums = self._believed() * np.minimum(sums, counts)
        drafts = num_drafting * counts.cumsum(0).cumsum(1)
        correct = num_drafting * sums.cumsum(0).cumsum(1)
        # Empty bins repeat their neighbour, which is harmless.
        none = np.zeros((self.max_depth, 1))
        return np.hstack([none, drafts]), np.hstack([none, correct])

    def _believed(self) -> float:
        """Return the share of the remembered survival that can be true."""
        possible = self._correct + 2.0 * math.sqrt(self._correct + 1.0) + 1.0
        return min(1.0, possible / max(self._expected, 1e-12))
