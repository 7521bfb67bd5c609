"""Calibration on a GPU: the CPU's results, without a wait."""

import numpy as np
import pytest
import torch

from sglang_tetris.core import Calibrator, DraftTrees
from tests.reference.calibration import random_labels
from tests.reference.forests import forest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

BS, MAX_NODES = 32, 21


def calibrated_on(device: str) -> torch.Tensor:
    rng = np.random.default_rng(2)
    cpu = forest(rng, BS, MAX_NODES)
    trees = DraftTrees(
        tokens=cpu.tokens.to(device),
        parents=cpu.parents.to(device),
        accept_probs=cpu.accept_probs.to(device),
        num_nodes=cpu.num_nodes.to(device),
    )
    classes = torch.from_numpy(rng.integers(0, 8, BS)).to(device)
    calibrator = Calibrator()
    # The first call on a device makes its tables there.
    calibrator.calibrate_trees(trees, classes)
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    for _ in range(3):
        calibrator.update(*random_labels(rng, 200))
        calibrated = calibrator.calibrate_trees(trees, classes).accept_probs
    if device != "cpu":
        torch.cuda.set_sync_debug_mode("default")
    return calibrated.cpu()


def test_calibrated_trees_equal_the_cpus_and_do_not_wait():
    assert calibrated_on("cuda").equal(calibrated_on("cpu"))
