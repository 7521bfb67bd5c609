"""depths_and_ranks: siblings by the draft's probability, then the lower node."""

import numpy as np
import pytest
import torch

from sglang_tetris.core import depths_and_ranks
from tests.reference import calibration
from tests.reference.forests import forest, trees_of

pytestmark = pytest.mark.usefixtures("implementation")


def test_siblings_are_ranked_under_each_parent():
    trees = trees_of(
        [
            (1, -1, 0.2),
            (2, -1, 0.7),
            (3, 0, 0.1),
            (4, -1, 0.2),
            (5, 0, 0.9),
            (6, 2, 0.5),
        ],
        [(9, -1, 1.0)],
    )
    depths, ranks = depths_and_ranks(trees)
    assert depths.tolist() == [[1, 1, 2, 1, 2, 3], [1, 0, 0, 0, 0, 0]]
    assert ranks.tolist() == [[1, 0, 1, 2, 0, 0], [0, 0, 0, 0, 0, 0]]
    assert depths.dtype == ranks.dtype == torch.int64


@pytest.mark.parametrize("levels", [(), (0.0, 0.25, 0.5)])
@pytest.mark.parametrize("seed", range(10))
def test_equals_the_reference(seed, levels):
    trees = forest(np.random.default_rng(seed), bs=6, max_nodes=23, levels=levels)
    depths, ranks = depths_and_ranks(trees)
    assert (depths.tolist(), ranks.tolist()) == calibration.depths_and_ranks(trees)


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0)])
def test_empty(shape):
    depths, ranks = depths_and_ranks(forest(np.random.default_rng(0), *shape))
    assert depths.shape == ranks.shape == shape
