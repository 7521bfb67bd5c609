"""path_survival: the float32 product from the anchor down, 0 at padding."""

import numpy as np
import pytest
import torch

from sglang_tetris.core import DraftTrees, path_survival
from tests.reference import selection
from tests.reference.forests import forest, trees_of

pytestmark = pytest.mark.usefixtures("implementation")


def test_product_along_the_path():
    trees = trees_of(
        [(1, -1, 0.5), (2, 0, 0.5), (3, 0, 0.25), (4, 2, 1.0)], [(9, -1, 0.75)]
    )
    assert path_survival(trees).tolist() == [[0.5, 0.25, 0.125, 0.125], [0.75, 0, 0, 0]]


@pytest.mark.parametrize("seed", range(20))
def test_equals_the_reference_bit_for_bit(seed):
    trees = forest(np.random.default_rng(seed), bs=7, max_nodes=33)
    got = path_survival(trees)
    assert got.dtype == torch.float32
    assert np.array_equal(got.numpy(), np.array(selection.survival(trees)))


def test_a_depth_bound_changes_nothing():
    trees = forest(np.random.default_rng(0), bs=4, max_nodes=12)
    bounded = DraftTrees(
        tokens=trees.tokens,
        parents=trees.parents,
        accept_probs=trees.accept_probs,
        num_nodes=trees.num_nodes,
        max_depth=12,
    )
    assert path_survival(bounded).equal(path_survival(trees))


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0)])
def test_empty(shape):
    trees = forest(np.random.default_rng(0), *shape)
    assert path_survival(trees).shape == shape


def test_arguments_stay_as_they_were():
    trees = trees_of([(1, -1, 0.5), (2, 0, 0.5)])
    path_survival(trees)
    assert trees.accept_probs.tolist() == [[0.5, 0.5]]
