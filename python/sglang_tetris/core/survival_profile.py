"""What the next drafts will be worth, judged by the last ones.

A decayed histogram of survival for each depth, counted per drafting request. From it
follows, for any depth d and R drafting requests, the curve

    num_drafts[i]   how many drafts of depth <= d have a survival in the best i bins
    num_correct[i]  the sum of their survivals

which is what the best `num_drafts[i]` drafts of a batch yield. Depths that were not
drafted lately keep what was last seen of them. Bins are equal in log survival; a bin
remembers the sum of its values, so the curve is exact at its points.
"""

import numpy as np
import numpy.typing as npt

Reals = npt.NDArray[np.float64]

_NUM_BINS = 48
_LEAST = 1e-4
_STEP = -np.log(_LEAST) / (_NUM_BINS - 1)


class SurvivalProfile:
    """See the module.

    max_depth     deepest level that is ever drafted
    memory        how many drafting requests are remembered, about
    """

    def __init__(self, max_depth: int, *, memory: int = 256) -> None:
        self.max_depth = max_depth
        self._memory = memory
        self._counts = np.zeros((max_depth, _NUM_BINS))
        self._sums = np.zeros((max_depth, _NUM_BINS))
        self._requests = np.zeros(max_depth)

    def add(
        self,
        survival: npt.NDArray[np.float32],
        depths: npt.NDArray[np.int64],
        *,
        drafted_depth: int,
    ) -> None:
        """Take in one round's trees, `[requests, nodes]`; depth 0 marks padding."""
        requests = survival.shape[0]
        if requests == 0 or drafted_depth == 0:
            return
        real = depths > 0
        levels = depths[real] - 1
        values = survival[real].astype(np.float64)
        bins = (-np.log(np.maximum(values, _LEAST)) / _STEP).astype(np.int64)
        where = levels * _NUM_BINS + bins
        keep = max(0.5, 1.0 - requests / self._memory)
        top = slice(0, drafted_depth)
        for total, weights in ((self._counts, None), (self._sums, values)):
            added = np.bincount(where, weights, self.max_depth * _NUM_BINS)
            total[top] *= keep
            total += added.reshape(total.shape)
        self._requests[top] = keep * self._requests[top] + requests

    def is_known(self, depth: int) -> bool:
        """Whether anything of that depth was ever drafted."""
        return bool(self._requests[depth - 1] > 0)

    def curve(self, depth: int, num_drafting: int) -> tuple[Reals, Reals]:
        """Return (num_drafts, num_correct) of `num_drafting` trees of that depth.

        Both start with 0 and never fall; reals, since they are means over rounds.
        """
        share = num_drafting / np.maximum(self._requests[:depth, None], 1e-12)
        drafts = (self._counts[:depth] * share).sum(0).cumsum()
        correct = (self._sums[:depth] * share).sum(0).cumsum()
        # Empty bins repeat their neighbour, which is harmless.
        return np.append(0.0, drafts), np.append(0.0, correct)
