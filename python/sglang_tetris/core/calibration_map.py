"""The map from a draft's probability to an accept probability, and how it is looked up.

One map per cell = (sampling class, depth, rank), the last two capped: piecewise linear
through KNOTS, 0 at 0, never falling. In a segment that starts at `knot`, with the map's
values `low` and `high` at its ends,

    calibrated = min(low + (prob - knot) / width * (high - low), high)

all in float32 and in this order on every backend. Each operation rounds without
changing order, so a cell's map never falls, in bits as well. Knots and widths are
sums of few powers of two, so the identity map returns exactly what it was given.

Not decided here: the values at the knots (core.calibration_fit).
"""

import numpy as np
import torch

from sglang_tetris.core.sampling_classes import NUM_SAMPLING_CLASSES

# A change of the next three needs a new format of saved calibrators.
# Dense at both ends, where a small step changes the odds most; all are multiples of
# 1/64 and all widths powers of two. On the draft models of examples/ 5 to 9 knots
# measured a larger calibration error, 17 and 23 a larger Brier score.
KNOTS = np.array(
    [0, 1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 60, 62, 63, 64], np.float64
) / np.float64(64)
# Nodes at or beyond a cap share a cell. Deeper ones are rarely reached; of siblings,
# the first and the second matter, the rest are alike.
MAX_CELL_DEPTH = 6
MAX_CELL_RANK = 2

NUM_KNOTS = len(KNOTS)
NUM_SEGMENTS = NUM_KNOTS - 1
CELLS_PER_CLASS = MAX_CELL_DEPTH * (MAX_CELL_RANK + 1)
# Index of the segment that holds a probability, by its whole 64ths; a knot belongs to
# the segment that it starts, 1 to the last.
SEGMENT_OF_64TH = np.minimum(
    np.searchsorted(KNOTS, np.arange(65) / 64, side="right") - 1, NUM_SEGMENTS - 1
)
KNOTS_32 = KNOTS.astype(np.float32)
INVERSE_WIDTHS_32 = (1 / np.diff(KNOTS)).astype(np.float32)


def identity_values() -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return `[classes, depths, ranks, knots]` float64, the identity in every cell."""
    shape = (NUM_SAMPLING_CLASSES, MAX_CELL_DEPTH, MAX_CELL_RANK + 1, NUM_KNOTS)
    return np.broadcast_to(KNOTS, shape).copy()


class MapTensors:
    """A calibrator's maps on one device.

    values          [classes * CELLS_PER_CLASS, NUM_KNOTS] float32
    knots           [NUM_KNOTS] float32
    inverse_widths  [NUM_SEGMENTS] float32

    Made once, at start-up. `refresh` writes in place: whatever was queued before it
    reads the old values, and addresses stay. It only copies from the host, which waits
    for nothing.
    """

    __slots__ = ("inverse_widths", "knots", "values", "version")

    def __init__(self, device: torch.device) -> None:
        self.knots = torch.from_numpy(KNOTS_32).to(device)
        self.inverse_widths = torch.from_numpy(INVERSE_WIDTHS_32).to(device)
        rows = NUM_SAMPLING_CLASSES * CELLS_PER_CLASS
        self.values = torch.empty(rows, NUM_KNOTS, device=device)
        self.version = -1

    def refresh(
        self, values: np.ndarray[tuple[int, ...], np.dtype[np.float32]], version: int
    ) -> None:
        """Copy `values` here unless this version is here already."""
        if version == self.version:
            return
        host = torch.from_numpy(values).view(self.values.shape)
        if self.values.device.type == "cuda":
            # A copy from pageable memory may wait for the stream.
            host = host.pin_memory()
        self.values.copy_(host, non_blocking=True)
        self.version = version


def calibrated_torch(
    probs: torch.Tensor,
    depths: torch.Tensor,
    ranks: torch.Tensor,
    classes: torch.Tensor,
    maps: MapTensors,
) -> torch.Tensor:
    """Look every node up, `[bs, max_nodes]` float32, 0 at depth 0; no wait.

    What is out of range is moved into it (NaN to 0): an index past the table would end
    the process on an accelerator.
    """
    depth = depths.clamp(1, MAX_CELL_DEPTH) - 1
    cell = classes.clamp(0, NUM_SAMPLING_CLASSES - 1)[:, None] * MAX_CELL_DEPTH + depth
    cell = cell * (MAX_CELL_RANK + 1) + ranks.clamp(0, MAX_CELL_RANK)
    node = depths > 0
    prob = torch.where(node & (probs >= 0), probs, 0.0).clamp(max=1.0)
    segment = torch.bucketize(prob, maps.knots[1:-1], right=True)
    place = cell * NUM_KNOTS + segment
    low, high = maps.values.take(place), maps.values.take(place + 1)
    step = (prob - maps.knots[segment]) * maps.inverse_widths[segment]
    value = torch.minimum(low + step * (high - low), high)
    return torch.where(node, value, 0.0)
