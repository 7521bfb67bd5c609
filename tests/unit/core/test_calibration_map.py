"""The looked-up map: identity, order, and the same bits on every backend."""

import numpy as np
import pytest
import torch

from sglang_tetris.core import (
    NUM_SAMPLING_CLASSES,
    Calibrator,
    calibration_map,
    depths_and_ranks,
)
from sglang_tetris.core.calibration_map import (
    KNOTS,
    MAX_CELL_DEPTH,
    MAX_CELL_RANK,
    MapTensors,
    calibrated_torch,
)
from tests.reference.calibration import random_labels
from tests.reference.forests import forest


def random_calibrator(rng):
    calibrator = Calibrator()
    for _ in range(20):
        calibrator.update(*random_labels(rng, 200))
    return calibrator


def nodes_of(probs, depth, rank, group):
    """One request whose nodes share a cell."""
    probs = torch.as_tensor(probs, dtype=torch.float32)[None]
    depths = torch.full(probs.shape, depth)
    return probs, depths, torch.full(probs.shape, rank), torch.tensor([group])


# Every knot, its neighbours in float32, and much between.
_AT_KNOTS = KNOTS.astype(np.float32)
PROBS = np.unique(
    np.concatenate(
        [
            _AT_KNOTS,
            np.nextafter(_AT_KNOTS[:-1], np.float32(1)),
            np.nextafter(_AT_KNOTS[1:], np.float32(0)),
            np.random.default_rng(0).random(3000, dtype=np.float32),
            np.geomspace(1e-30, 1e-2, 200, dtype=np.float32),
        ]
    )
)


@pytest.mark.parametrize("group", range(NUM_SAMPLING_CLASSES))
@pytest.mark.usefixtures("implementation")
def test_identity_without_data(group):
    for depth, rank in ((1, 0), (MAX_CELL_DEPTH + 5, MAX_CELL_RANK + 5)):
        nodes = nodes_of(PROBS, depth, rank, group)
        assert Calibrator().calibrate(*nodes).equal(nodes[0])


@pytest.mark.usefixtures("implementation")
def test_never_falls_and_stays_a_probability():
    calibrator = random_calibrator(np.random.default_rng(1))
    flattest = 1.0
    for group in range(NUM_SAMPLING_CLASSES):
        for depth in range(1, MAX_CELL_DEPTH + 1):
            for rank in range(MAX_CELL_RANK + 1):
                nodes = nodes_of(PROBS, depth, rank, group)
                calibrated = calibrator.calibrate(*nodes)[0]
                assert calibrated[0] == 0
                assert calibrated[-1] <= 1
                assert (calibrated.diff() >= 0).all()
                assert (calibrated[PROBS > 0] > 0).all()
                flattest = min(flattest, float(calibrated[-1]))
    assert flattest < 0.7, "the maps are rough enough to have been pooled"


@pytest.mark.usefixtures("implementation")
def test_no_value_is_passed():
    """A knot has its value; 1, the end of the last segment, at most that."""
    calibrator, rng = Calibrator(), np.random.default_rng(3)
    shape = calibrator._table.shape[:3]
    # Where low + (high - low) often is not high.
    calibrator._table[..., 1:-1] = rng.uniform(0.25, 0.375, (*shape, 1))
    calibrator._table[..., -1] = rng.uniform(0.8, 1, shape)
    for cell in np.ndindex(shape):
        group, depth, rank = cell
        calibrated = calibrator.calibrate(*nodes_of(KNOTS, depth + 1, rank, group))
        got, want = calibrated[0].numpy(), calibrator._table[cell]
        assert np.array_equal(got[:-1], want[:-1])
        assert want[-1] - 1e-6 < got[-1] <= want[-1]


@pytest.mark.usefixtures("implementation")
def test_continuous():
    calibrator = random_calibrator(np.random.default_rng(2))
    grid = np.linspace(0, 1, 2**14 + 1, dtype=np.float32)
    calibrated = calibrator.calibrate(*nodes_of(grid, 2, 1, 3))[0]
    # No segment is steeper than 1 per 1/64.
    assert calibrated.diff().max() < 64 / 2**14 + 1e-6


@pytest.mark.parametrize("seed", range(8))
def test_all_backends_give_the_same_bits(seed, monkeypatch):
    pytest.importorskip("numba")
    from sglang_tetris.core import backend

    rng = np.random.default_rng(seed)
    calibrator = random_calibrator(rng)
    trees = forest(rng, bs=9, max_nodes=21)
    classes = torch.from_numpy(rng.integers(0, NUM_SAMPLING_CLASSES, 9))
    in_trees = calibrator.calibrate_trees(trees, classes)
    depths, ranks = depths_and_ranks(trees)
    compiled = calibrator.calibrate(trees.accept_probs, depths, ranks, classes)
    maps = MapTensors(torch.device("cpu"))
    maps.refresh(calibrator._table, version=0)
    nodes = trees.accept_probs, depths, ranks, classes
    in_torch = calibrated_torch(*nodes, maps)
    monkeypatch.setattr(backend, "load_loops", lambda: None)
    without_numba = calibrator.calibrate_trees(trees, classes)
    for other in (in_trees.accept_probs, in_torch, without_numba.accept_probs):
        assert compiled.equal(other)
    assert (compiled[~trees.is_node()] == 0).all()
    assert not compiled.equal(trees.accept_probs)


@pytest.mark.usefixtures("implementation")
def test_trees_keep_everything_else():
    trees = forest(np.random.default_rng(5), bs=4, max_nodes=7)
    before = trees.accept_probs.clone()
    calibrator = random_calibrator(np.random.default_rng(6))
    calibrated = calibrator.calibrate_trees(trees, torch.arange(4))
    for name in ("tokens", "parents", "num_nodes", "max_depth"):
        assert getattr(calibrated, name) is getattr(trees, name)
    calibrated.validate()
    assert trees.accept_probs.equal(before) or before.isnan().any()
    assert not calibrated.accept_probs.isnan().any()


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0)])
def test_empty(shape):
    trees = forest(np.random.default_rng(0), *shape)
    classes = torch.zeros(shape[0], dtype=torch.int64)
    assert Calibrator().calibrate_trees(trees, classes).accept_probs.shape == shape


@pytest.mark.usefixtures("implementation")
def test_requests_are_independent_of_their_order():
    rng = np.random.default_rng(7)
    calibrator, trees = random_calibrator(rng), forest(rng, bs=12, max_nodes=9)
    classes = torch.from_numpy(rng.integers(0, NUM_SAMPLING_CLASSES, 12))
    depths, ranks = depths_and_ranks(trees)
    nodes = (trees.accept_probs, depths, ranks, classes)
    order = torch.from_numpy(rng.permutation(12))
    whole = calibrator.calibrate(*nodes)
    permuted = calibrator.calibrate(*(part[order] for part in nodes))
    assert permuted.equal(whole[order])


BAD_NODES = [
    ({"probs": [0.5, float("nan")]}, r"accept_probs .* got nan at \[0, 1\]"),
    ({"probs": [1.5, 0.5]}, r"accept_probs .* got 1.5 at \[0, 0\]"),
    ({"probs": [-0.25, 0.5]}, r"accept_probs .* got -0.25 at \[0, 0\]"),
    ({"depth": -1}, r"depths .* got -1 at \[0, 0\]"),
    ({"rank": -2}, r"ranks .* got -2 at \[0, 0\]"),
    ({"group": NUM_SAMPLING_CLASSES}, r"classes .* \[0, 7\], got 8 at \[0\]"),
    ({"group": -1}, r"classes .* got -1 at \[0\]"),
]


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(("change", "message"), BAD_NODES)
def test_values_that_cannot_be(change, message):
    values = {"probs": [0.5, 0.5], "depth": 1, "rank": 0, "group": 0} | change
    with pytest.raises(ValueError, match=message):
        Calibrator().calibrate(*nodes_of(**values))


@pytest.mark.usefixtures("implementation")
def test_shapes_and_dtypes_that_cannot_be():
    probs, depths, ranks, classes = nodes_of([0.5, 0.5], 1, 0, 0)
    calibrator = Calibrator()
    for nodes, message in (
        (
            (probs.double(), depths, ranks, classes),
            "accept_probs must be torch.float32",
        ),
        ((probs, depths[:, :1], ranks, classes), r"depths must have shape .* \[1, 1\]"),
        ((probs, depths, ranks.int(), classes), r"ranks must be torch.int64"),
        ((probs, depths, ranks, classes[:0]), r"classes must have shape .* \[0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            calibrator.calibrate(*nodes)
    trees = forest(np.random.default_rng(0), 3, 4)
    for classes, message in (
        (torch.zeros(2).long(), r"classes must have shape"),
        (torch.full((3,), 8), r"classes must be in \[0, 7\], got 8"),
    ):
        with pytest.raises(ValueError, match=message):
            calibrator.calibrate_trees(trees, classes)


def test_a_table_is_never_read_out_of_bounds():
    calibrator = random_calibrator(np.random.default_rng(0))
    maps = MapTensors(torch.device("cpu"))
    maps.refresh(calibrator._table, version=3)
    garbage = torch.tensor([[float("nan"), -1.0, 2.0, 0.5]])
    far = torch.tensor([[1, 10**9, 1, 1]])
    out = calibrated_torch(garbage, far, far, torch.tensor([99]), maps)
    assert out[0, :2].tolist() == [0, 0]
    assert 0 <= out.min() <= out.max() <= 1


def test_a_device_is_given_new_maps_when_there_are_any(monkeypatch):
    copies = []
    plain = MapTensors.refresh

    def watched(maps, values, version):
        copies.append(version != maps.version)
        plain(maps, values, version)

    monkeypatch.setattr(calibration_map.MapTensors, "refresh", watched)
    calibrator, rng = Calibrator(), np.random.default_rng(0)
    nodes = [part.to("meta") for part in nodes_of([0.5], 1, 0, 0)]
    for _ in range(2):
        calibrator.calibrate(*nodes)
        calibrator.calibrate(*nodes)
        calibrator.update(*random_labels(rng, 5))
    assert copies == [True, False, True, False]
