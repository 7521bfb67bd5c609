"""Compiled loops of calibration; core.node_ranks, core.calibration_map,
core.calibration_fit and core.node_labels define what they compute.
"""

import numpy as np
import numpy.typing as npt

from sglang_tetris.core import calibration_fit, node_labels
from sglang_tetris.core.calibration_map import (
    INVERSE_WIDTHS_32,
    KNOTS_32,
    MAX_CELL_DEPTH,
    MAX_CELL_RANK,
    SEGMENT_OF_64TH,
)
from sglang_tetris.core.jit import compiled
from sglang_tetris.core.sampling_classes import NUM_SAMPLING_CLASSES

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

add_labels = compiled(
    "void(f8[::1], i8[::1], i8[::1], i8[::1], b1[::1], f8[:,:,:,::1], f8, "
    "f8[:,:,:,:,::1], f8[:,::1], b1[::1])"
)(calibration_fit.add_labels)
fit_class = compiled("void(f8[:,:,:,::1], f8[:,:,::1], f8, f8[:,:,::1])")(
    calibration_fit.fit_class
)
pool_violators = compiled("void(f8[:,:,::1], f8[:,:,::1], f8)")(
    calibration_fit.pool_violators
)

fill_labels = compiled(
    "i8(i8[:,::1], i8[:,::1], i8[::1], i4[::1], i4[:,::1], b1[::1], i8[::1], b1[::1])"
)(node_labels.fill_labels)


@compiled("void(i8[:,::1], f4[:,::1], i8[::1], i8[:,::1], i8[:,::1])")
def fill_ranks(
    parents: Ints, probs: Floats, num_nodes: Ints, depths: Ints, ranks: Ints
) -> None:
    """Fill the last two arguments, padding included."""
    bs, max_nodes = parents.shape
    # By parent + 1, so that the anchor's children have a list too.
    last_child = np.empty(max_nodes + 1, np.int64)
    previous = np.empty(max_nodes, np.int64)
    for request in range(bs):
        count = num_nodes[request]
        last_child[: count + 1] = -1
        for node in range(count):
            parent = parents[request, node]
            depths[request, node] = 1 if parent < 0 else depths[request, parent] + 1
            prob = probs[request, node]
            rank = 0
            other = last_child[parent + 1]
            previous[node] = other
            last_child[parent + 1] = node
            while other >= 0:
                if prob > probs[request, other]:
                    ranks[request, other] += 1
                else:
                    rank += 1
                other = previous[other]
            ranks[request, node] = rank
        depths[request, count:] = 0
        ranks[request, count:] = 0


@compiled("i8(f4[:,::1], i8[:,::1], i8[:,::1], i8[::1], f4[:,:,:,::1], f4[:,::1])")
def fill_calibrated(
    probs: Floats,
    depths: Ints,
    ranks: Ints,
    classes: Ints,
    values: Floats,
    calibrated: Floats,
) -> int:
    """Fill the last argument, padding included; 0 if any value is out of range."""
    bs, max_nodes = probs.shape
    for request in range(bs):
        group = classes[request]
        if not 0 <= group < NUM_SAMPLING_CLASSES:
            return 0
        for node in range(max_nodes):
            depth = depths[request, node]
            if depth == 0:
                calibrated[request, node] = 0
                continue
            rank, prob = ranks[request, node], probs[request, node]
            # Written so that NaN is caught.
            if depth < 0 or rank < 0 or not 0 <= prob <= 1:
                return 0
            row = values[
                group, min(depth, MAX_CELL_DEPTH) - 1, min(rank, MAX_CELL_RANK)
            ]
            segment = SEGMENT_OF_64TH[int(prob * np.float32(64))]
            low, high = row[segment], row[segment + 1]
            step = (prob - KNOTS_32[segment]) * INVERSE_WIDTHS_32[segment]
            calibrated[request, node] = min(low + step * (high - low), high)
    return 1


@compiled("i8(i8[:,::1], f4[:,::1], i8[::1], i8[::1], f4[:,:,:,::1], f4[:,::1])")
def fill_calibrated_trees(
    parents: Ints,
    probs: Floats,
    num_nodes: Ints,
    classes: Ints,
    values: Floats,
    calibrated: Floats,
) -> int:
    """`fill_ranks`, then `fill_calibrated`."""
    depths = np.empty(parents.shape, np.int64)
    ranks = np.empty(parents.shape, np.int64)
    fill_ranks(parents, probs, num_nodes, depths, ranks)
    return fill_calibrated(probs, depths, ranks, classes, values, calibrated)
