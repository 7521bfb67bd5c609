"""The fitted maps equal a fit of all labels at once, on both implementations."""

import numpy as np
import pytest

from sglang_tetris.core import NUM_SAMPLING_CLASSES, Calibrator, backend
from sglang_tetris.core.calibration_fit import pool_violators
from sglang_tetris.core.calibration_map import (
    KNOTS,
    MAX_CELL_DEPTH,
    MAX_CELL_RANK,
)
from sglang_tetris.core.sampling_classes import NUM_PLAIN_CLASSES
from tests.reference import calibration
from tests.reference.calibration import random_labels


def random_rounds(seed, num_rounds=12):
    """Rounds of every size, some without any label of some class."""
    rng = np.random.default_rng(seed)
    rounds = []
    for size in rng.integers(0, 12, num_rounds):
        probs, depths, ranks, classes, correct = random_labels(rng, size)
        # Exact knots, 0 and 1 among them.
        probs[::4] = rng.choice(KNOTS, len(probs[::4]))
        rounds.append((probs, depths, ranks, classes, correct))
    return rounds


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_reference(seed):
    calibrator = Calibrator(half_life_rounds=3.0, prior_nodes=2.0)
    rounds = random_rounds(seed)
    for labels in rounds:
        calibrator.update(*labels)
    want = calibration.maps(
        [list(zip(*(part.tolist() for part in r), strict=True)) for r in rounds],
        knots=KNOTS,
        num_plain=NUM_PLAIN_CLASSES,
        cell_shape=(MAX_CELL_DEPTH, MAX_CELL_RANK + 1),
        half_life_rounds=3.0,
        prior_nodes=2.0,
    )
    assert np.abs(calibrator._values - want).max() < 1e-12
    assert np.array_equal(calibrator._table, calibrator._values.astype(np.float32))


def test_the_same_bits_with_and_without_numba(monkeypatch):
    pytest.importorskip("numba")
    compiled, plain = Calibrator(half_life_rounds=5.0), Calibrator(half_life_rounds=5.0)
    rounds = random_rounds(0, num_rounds=60)
    for labels in rounds:
        compiled.update(*labels)
    monkeypatch.setattr(backend, "load_loops", lambda: None)
    for labels in rounds:
        plain.update(*labels)
    assert np.array_equal(compiled._values, plain._values)
    assert compiled.to_json() == plain.to_json()


@pytest.mark.usefixtures("implementation")
def test_pooling_is_isotonic_regression():
    rng = np.random.default_rng(0)
    loops = backend.load_loops()
    pool = pool_violators if loops is None else loops.cpu_calibrate.pool_violators
    values = rng.random((6, 3, 15))
    values[0] = np.sort(values[0])
    nodes = rng.random((6, 3, 15)) * 20
    pooled = values.copy()
    pool(pooled, nodes, 0.5)
    for cell in np.ndindex(6, 3):
        want = calibration.isotonic(values[cell], nodes[cell] + 0.5)
        assert np.allclose(pooled[cell], want, rtol=0, atol=1e-12)
    assert np.array_equal(pooled[0], values[0]), "what rises keeps its bits"


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("plain", range(NUM_PLAIN_CLASSES))
def test_data_flow_between_classes(plain):
    """A plain class teaches its transformed one, and nothing flows anywhere else."""
    calibrator, fresh = Calibrator(), Calibrator()
    labels = list(random_labels(np.random.default_rng(0), 300))
    labels[3][:] = plain
    calibrator.update(*labels)
    transformed = plain + NUM_PLAIN_CLASSES
    values = calibrator._values
    assert not np.array_equal(values[plain], fresh._values[plain])
    assert np.array_equal(values[transformed], values[plain])
    for group in range(NUM_SAMPLING_CLASSES):
        if group not in (plain, transformed):
            assert np.array_equal(values[group], fresh._values[group])
    before = values.copy()
    labels[3][:] = transformed
    labels[4][:] = False
    calibrator.update(*labels)
    others = np.arange(NUM_SAMPLING_CLASSES) != transformed
    assert np.array_equal(values[others], before[others])
    assert (values[transformed][..., -1] < 0.6 * before[transformed][..., -1]).all()
