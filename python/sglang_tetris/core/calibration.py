"""Learns from what was verified how often a draft of a given probability is accepted.

    calibrated = map of (sampling class, depth, rank) at the draft's probability

The maps are monotone and start as the identity; how they are fitted is said in
core.calibration_fit, how they are looked up in core.calibration_map. Probabilities stay
at most 1, so survival does not grow along a path and whatever the allocator relies on
holds as before.

Time. A class's sums halve every `half_life_rounds` of its own rounds, that is of those
in which it has labels. A round without any teaches nothing and makes nothing old, and a
class that nobody uses for an hour is found as it was left.

Transformed classes. A transformed class's prior map is the map of its plain class as it
stands: the same draft, and most transforms leave most tokens alone. Nothing flows the
other way: the plain classes' maps have the same bits whatever the transformed ones saw.

Selection. Only verified nodes are labelled, and which ones are verified follows from
the maps. Conditioning on the probability takes most of that bias out. A cell that is no
longer verified learns nothing; its old labels fade with its class's rounds, so it comes
back to what coarser groups say and is tried again.

Not decided here: which nodes are labelled (core.node_labels), which class a request
has (core.sampling_classes), whether to calibrate at all (a caller without a calibrator
uses the draft's probabilities as they are).
"""

from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from sglang_tetris.core.backend import host_loops, loops_for
from sglang_tetris.core.calibration_fit import (
    add_labels,
    fit_class,
    pool_violators,
)
from sglang_tetris.core.calibration_map import (
    KNOTS,
    MapTensors,
    calibrated_torch,
    identity_values,
)
from sglang_tetris.core.calibration_state import CalibrationState
from sglang_tetris.core.errors import check_tensor, on_plain_cpu
from sglang_tetris.core.node_ranks import depths_and_ranks
from sglang_tetris.core.sampling_classes import (
    NUM_PLAIN_CLASSES,
    NUM_SAMPLING_CLASSES,
)
from sglang_tetris.core.types import DraftTrees


class Calibrator:
    """One server's calibration; changed by `update` alone, from one thread.

    half_life_rounds  rounds of a class after which its labels count half, > 0. 200: a
                      change of workload is followed within some hundred rounds, and
                      longer ones measured little better on a workload that stays.
    prior_nodes       strength of each coarser estimate, in nodes, > 0. 16: from 8 to
                      32 measured alike.

    The same updates give the same maps, bit for bit, with and without numba. Raises
    ValueError naming the argument and its value.
    """

    __slots__ = ("_maps_on", "_state", "_table", "_values")

    def __init__(
        self, *, half_life_rounds: float = 200.0, prior_nodes: float = 16.0
    ) -> None:
        self._begin(
            CalibrationState.empty(
                half_life_rounds=half_life_rounds, prior_nodes=prior_nodes
            )
        )

    def _begin(self, state: CalibrationState) -> None:
        self._state = state
        self._values = identity_values()
        # What is looked up: the same values in float32.
        self._table = self._values.astype(np.float32)
        self._maps_on: dict[torch.device, MapTensors] = {}
        self._fit(state.totals[:, 0] > 0)

    @property
    def half_life_rounds(self) -> float:
        return self._state.half_life_rounds

    @property
    def prior_nodes(self) -> float:
        return self._state.prior_nodes

    def calibrate(
        self,
        accept_probs: torch.Tensor,
        depths: torch.Tensor,
        ranks: torch.Tensor,
        classes: torch.Tensor,
    ) -> torch.Tensor:
        """Return `[bs, max_nodes]` float32 in [0, 1], 0 at padding.

        accept_probs  [bs, max_nodes] float32 in [0, 1], the draft's
        depths        [bs, max_nodes] int64, 1 = child of the anchor, 0 = padding, where
                      nothing else is read
        ranks         [bs, max_nodes] int64 >= 0, see `depths_and_ranks`
        classes       [bs] int64, see `sampling_class`

        Among nodes of one class, depth and rank the order by `accept_probs` is kept;
        ties can arise. Nothing waits for an accelerator, where values are not checked:
        NaN counts as 0, anything else out of range as the nearest bound. Raises
        ValueError for a wrong shape, dtype, device or (on a CPU) value.
        """
        layout, device = "[bs, max_nodes]", accept_probs.device
        check_tensor("accept_probs", accept_probs, layout, (-1, -1), torch.float32)
        shape = accept_probs.shape
        check_tensor("depths", depths, layout, shape, torch.int64, device)
        check_tensor("ranks", ranks, layout, shape, torch.int64, device)
        check_tensor("classes", classes, "[bs]", shape[:1], torch.int64, device)
        loops = loops_for(accept_probs)
        if loops is not None:
            found: torch.Tensor | None
            found = loops.calibrated(accept_probs, depths, ranks, classes, self._table)
            if found is not None:
                return found
        if on_plain_cpu(accept_probs):
            _check_nodes_host(accept_probs, depths, ranks, classes)
        maps = self._maps_on.get(device)
        if maps is None:
            maps = self._maps_on[device] = MapTensors(device)
        maps.refresh(self._table, version=self._state.num_rounds)
        return calibrated_torch(accept_probs, depths, ranks, classes, maps)

    def calibrate_trees(self, trees: DraftTrees, classes: torch.Tensor) -> DraftTrees:
        """Return the trees with calibrated `accept_probs`; `calibrate` says the rest.

        `trees` holds the draft's own probabilities, by which siblings are ranked.
        """
        rows, device = (trees.batch_size,), trees.tokens.device
        check_tensor("classes", classes, "[bs]", rows, torch.int64, device)
        loops = loops_for(trees.tokens)
        calibrated: torch.Tensor | None = None
        if loops is not None:
            calibrated = loops.calibrated_trees(trees, classes, self._table)
        if calibrated is None:
            # Without the loops, or to word what they found out of range.
            depths, ranks = depths_and_ranks(trees)
            calibrated = self.calibrate(trees.accept_probs, depths, ranks, classes)
        return trees.with_accept_probs(calibrated)

    def update(
        self,
        probs: npt.ArrayLike,
        depths: npt.ArrayLike,
        ranks: npt.ArrayLike,
        classes: npt.ArrayLike,
        correct: npt.ArrayLike,
    ) -> None:
        """Learn one round's labels, and fit the maps of their classes anew.

        probs    [n] floats in [0, 1], the draft's own, not calibrated ones
        depths   [n] ints >= 1
        ranks    [n] ints >= 0
        classes  [n] ints, one per node, see `sampling_class`
        correct  [n] bools

        n = 0 changes nothing. Raises ValueError, having changed nothing.
        """
        probs = _flat("probs", probs, "f", np.float64)
        size = len(probs)
        depths = _flat("depths", depths, "iu", np.int64, size)
        ranks = _flat("ranks", ranks, "iu", np.int64, size)
        classes = _flat("classes", classes, "iu", np.int64, size)
        correct = _flat("correct", correct, "b", np.bool_, size)
        if size == 0:
            return
        _check_range("probs", probs, 0, 1)
        _check_range("depths", depths, 1)
        _check_range("ranks", ranks, 0)
        _check_range("classes", classes, 0, NUM_SAMPLING_CLASSES - 1)
        state, loops = self._state, host_loops()
        add = add_labels if loops is None else loops.cpu_calibrate.add_labels
        touched = np.zeros(NUM_SAMPLING_CLASSES, np.bool_)
        add(
            probs,
            depths,
            ranks,
            classes,
            correct,
            self._values,
            0.5 ** (1 / state.half_life_rounds),
            state.sums,
            state.totals,
            touched,
        )
        state.num_rounds += 1
        self._fit(touched)

    def _fit(self, touched: npt.NDArray[np.bool_]) -> None:
        """Fit the touched classes' maps, and those that have one of them as prior."""
        values, state, loops = self._values, self._state, host_loops()
        fit, pool = fit_class, pool_violators
        if loops is not None:
            fit, pool = (
                loops.cpu_calibrate.fit_class,
                loops.cpu_calibrate.pool_violators,
            )
        identity = np.broadcast_to(KNOTS, values.shape[1:]).copy()
        for group in range(NUM_SAMPLING_CLASSES):
            plain = group % NUM_PLAIN_CLASSES
            if touched[group] or touched[plain]:
                prior = identity if group == plain else values[plain]
                fit(state.sums[group], prior, state.prior_nodes, values[group])
                pool(values[group], state.sums[group, 0], state.prior_nodes)
                self._table[group] = values[group]

    def describe(self) -> dict[str, Any]:
        """Return what was learnt, for a server's status.

        `num_rounds` that had labels, and by class that has any: `nodes` (their decayed
        number), `raw_mean`, `calibrated_mean` (by the maps of their round, which had
        not seen them) and `accept_rate`.
        """
        return self._state.describe()

    def to_json(self) -> str:
        """Return the state as JSON text, from which `from_json` goes on exactly."""
        return self._state.to_json()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a calibrator from JSON text; ValueError for anything that is not one."""
        calibrator = cls.__new__(cls)
        calibrator._begin(CalibrationState.from_json(text))
        return calibrator


def _flat(
    name: str,
    values: npt.ArrayLike,
    kinds: str,
    dtype: type[np.generic],
    size: int | None = None,
) -> npt.NDArray[Any]:
    """Return `values` as a contiguous [n] array of that dtype, or raise ValueError."""
    array = np.asarray(values)
    if array.ndim != 1 or (size is not None and len(array) != size):
        wanted = "n" if size is None else size
        raise ValueError(f"{name} must have shape [{wanted}], got {list(array.shape)}")
    # An empty list has numpy's default dtype.
    if array.size and array.dtype.kind not in kinds:
        raise ValueError(f"{name} must be of dtype kind {kinds!r}, got {array.dtype}")
    return np.ascontiguousarray(array, dtype)


def _check_range(
    name: str, values: npt.NDArray[Any], lowest: int, highest: int | None = None
) -> None:
    # NaN makes both comparisons false.
    if values.min() >= lowest and (highest is None or values.max() <= highest):
        return
    inside = values >= lowest
    wanted = f"at least {lowest}"
    if highest is not None:
        inside &= values <= highest
        wanted = f"in [{lowest}, {highest}]"
    place = int(np.argmin(inside))
    raise ValueError(f"{name} must be {wanted}, got {values[place]} at [{place}]")


def _check_nodes_host(
    probs: torch.Tensor,
    depths: torch.Tensor,
    ranks: torch.Tensor,
    classes: torch.Tensor,
) -> None:
    """Raise ValueError unless a lookup's values are in range; reads values."""
    node = depths != 0
    for name, values, inside, wanted in (
        ("depths", depths, depths >= 0, "at least 0"),
        ("ranks", ranks, ~node | (ranks >= 0), "at least 0"),
        # Written so that NaN is caught.
        ("accept_probs", probs, ~node | ((probs >= 0) & (probs <= 1)), "in [0, 1]"),
        (
            "classes",
            classes,
            (classes >= 0) & (classes < NUM_SAMPLING_CLASSES),
            f"in [0, {NUM_SAMPLING_CLASSES - 1}]",
        ),
    ):
        if not inside.all():
            where = (~inside).nonzero()[0].tolist()
            value = values[tuple(where)].item()
            raise ValueError(f"{name} must be {wanted}, got {value} at {where}")
