"""Fits the maps of a class to what was verified: plain loops.

Every label (raw probability x, correct or not) counts at the two knots around x, more
at the nearer one. Per cell and knot there are three sums of those shares: `nodes`,
`probs` (of x) and `correct`. With a prior map p (the identity for a plain class),

    factor = (correct + m p f) / (probs p / x + m p)      value = min(p factor, 1)

where x and p are taken at the knot, m is the strength of the prior in nodes, and f is
the same factor of a coarser group: a cell leans on its (class, rank), that on its
class, and the class on 1, which is the prior map itself. Values are positive where p
is, so a node is never written off for good. Neighbouring values that fall are then
averaged, by nodes, until none does (pool adjacent violators).

Why a ratio and not the plain rate of a bin: labels do not lie at the knots; the ratio
is right for them wherever the map is roughly a line through 0, and keeps small
probabilities apart.

core.cpu_calibrate compiles these functions; where numba is missing they run as they
stand, with the same bits. Hence no calls among them.
"""

import numpy as np
import numpy.typing as npt

from sglang_tetris.core.calibration_map import (
    KNOTS,
    MAX_CELL_DEPTH,
    MAX_CELL_RANK,
    SEGMENT_OF_64TH,
)

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]


def add_labels(
    probs: Reals,
    depths: Ints,
    ranks: Ints,
    classes: Ints,
    correct: Bools,
    values: Reals,
    decay: float,
    sums: Reals,
    totals: Reals,
    touched: Bools,
) -> None:
    """Count one round's labels; what a class knew decays once if it has any.

    values   [classes, depths, ranks, knots], the maps before these labels
    sums     [classes, 3, depths, ranks, knots]: nodes, probs, correct
    totals   [classes, 4]: nodes, raw and calibrated probability, correct
    touched  [classes], set where there is a label
    """
    for label in range(probs.shape[0]):
        group = classes[label]
        if not touched[group]:
            touched[group] = True
            sums[group] *= decay
            totals[group] *= decay
        prob = probs[label]
        depth = min(depths[label], MAX_CELL_DEPTH) - 1
        rank = min(ranks[label], MAX_CELL_RANK)
        knot = SEGMENT_OF_64TH[int(prob * 64)]
        share = (prob - KNOTS[knot]) / (KNOTS[knot + 1] - KNOTS[knot])
        low = values[group, depth, rank, knot]
        high = values[group, depth, rank, knot + 1]
        totals[group, 0] += 1
        totals[group, 1] += prob
        totals[group, 2] += low + share * (high - low)
        sums[group, 0, depth, rank, knot] += 1 - share
        sums[group, 0, depth, rank, knot + 1] += share
        sums[group, 1, depth, rank, knot] += (1 - share) * prob
        sums[group, 1, depth, rank, knot + 1] += share * prob
        if correct[label]:
            totals[group, 3] += 1
            sums[group, 2, depth, rank, knot] += 1 - share
            sums[group, 2, depth, rank, knot + 1] += share


def fit_class(sums: Reals, prior: Reals, prior_nodes: float, values: Reals) -> None:
    """Fill `values` `[depths, ranks, knots]`, monotone still to be made.

    sums `[3, depths, ranks, knots]`, prior as values. Knot 0 stays 0.
    """
    num_depths, num_ranks, num_knots = values.shape
    rank_weight = np.empty(num_ranks, np.float64)
    rank_correct = np.empty(num_ranks, np.float64)
    rank_expected = np.empty(num_ranks, np.float64)
    values[:, :, 0] = 0
    for knot in range(1, num_knots):
        weight, correct, expected = 0.0, 0.0, 0.0
        for rank in range(num_ranks):
            rank_weight[rank] = rank_correct[rank] = rank_expected[rank] = 0
            for depth in range(num_depths):
                at_knot = prior[depth, rank, knot]
                rank_weight[rank] += prior_nodes * at_knot / num_depths
                rank_correct[rank] += sums[2, depth, rank, knot]
                rank_expected[rank] += (
                    sums[1, depth, rank, knot] * at_knot / KNOTS[knot]
                )
            weight += rank_weight[rank] / num_ranks
            correct += rank_correct[rank]
            expected += rank_expected[rank]
        class_factor = (correct + weight) / (expected + weight)
        for rank in range(num_ranks):
            weight = rank_weight[rank]
            rank_factor = (rank_correct[rank] + weight * class_factor) / (
                rank_expected[rank] + weight
            )
            for depth in range(num_depths):
                at_knot = prior[depth, rank, knot]
                weight = prior_nodes * at_knot
                expected = sums[1, depth, rank, knot] * at_knot / KNOTS[knot]
                factor = (sums[2, depth, rank, knot] + weight * rank_factor) / (
                    expected + weight
                )
                values[depth, rank, knot] = min(at_knot * factor, 1.0)


def pool_violators(values: Reals, nodes: Reals, prior_nodes: float) -> None:
    """Average neighbours along the knots, in place, until no value falls.

    values and nodes `[depths, ranks, knots]`; a value weighs its nodes + the prior's.
    Values that already rise keep their bits.
    """
    num_depths, num_ranks, num_knots = values.shape
    # A stack of blocks: mean, weight, and the knot after its last.
    mean = np.empty(num_knots, np.float64)
    weight = np.empty(num_knots, np.float64)
    end = np.empty(num_knots, np.int64)
    for depth in range(num_depths):
        for rank in range(num_ranks):
            top = -1
            for knot in range(num_knots):
                top += 1
                mean[top] = values[depth, rank, knot]
                weight[top] = nodes[depth, rank, knot] + prior_nodes
                end[top] = knot + 1
                while top > 0 and mean[top - 1] > mean[top]:
                    joined = weight[top - 1] + weight[top]
                    mean[top - 1] = (
                        mean[top - 1] * weight[top - 1] + mean[top] * weight[top]
                    ) / joined
                    weight[top - 1] = joined
                    end[top - 1] = end[top]
                    top -= 1
            begin = 0
            for block in range(top + 1):
                values[depth, rank, begin : end[block]] = mean[block]
                begin = end[block]
