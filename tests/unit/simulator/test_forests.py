"""A recording's chains and trees are those that a drafter would have grown."""

import numpy as np

from tests.unit.simulator.worlds import recorded


def test_the_chain_takes_the_likeliest_child_and_the_tree_its_beam(tmp_path):
    """Node 2 is the chain's; the beam of 2 drops it after the second level.

    0 (.5) -> 2 (.2), 3 (.1)     1 (.4) -> 4 (.9), 5 (.05)     2 -> 6 (.9) -> 7 (.9)
    4 -> 8 (.5), which a drafter of two levels would not have grown
    """
    parents = [-1, -1, 0, 0, 1, 1, 2, 6, 4]
    probs = [0.5, 0.4, 0.2, 0.1, 0.9, 0.05, 0.9, 0.9, 0.5]
    row = (parents, probs, [1, 4])
    found = recorded(tmp_path, [row, ([], [], []), ([], [], []), ([], [], [])])
    chains, trees = found.chains, found.trees
    assert chains.probs[0].tolist() == np.float32([0.5, 0.2, 0.9]).tolist()
    assert chains.parents[0].tolist() == [-1, 0, 1]
    assert chains.depths[0].tolist() == [1, 2, 3]
    # 2 and 4 are the beam after level two (0.1 and 0.36); the chain goes on below 2.
    assert (
        trees.probs[0].tolist()
        == np.float32([0.5, 0.4, 0.2, 0.1, 0.9, 0.05, 0.9]).tolist()
    )
    assert trees.parents[0].tolist() == [-1, -1, 0, 0, 1, 1, 2]
    assert trees.num_nodes_to[0].tolist() == [0, 2, 6, 7]
    assert trees.ranks[0].tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert trees.is_correct[0].nonzero()[0].tolist() == [1, 4]
    assert trees.num_correct.tolist() == [2, 0, 0, 0]
    assert chains.num_correct.tolist() == [0, 0, 0, 0]


def test_the_last_token_is_never_a_draft(tmp_path):
    """Two tokens are left at the first row, one at the second."""
    found = recorded(
        tmp_path, [([-1, 0], [0.9, 0.9], [0, 1]), ([-1], [0.9], [0])], topk=1
    )
    assert found.left.tolist() == [2, 1]
    assert found.chains.num_correct.tolist() == [1, 0]


def test_levels_stand_in_order_and_parents_come_first(recording):
    for forest in (recording.chains, recording.trees):
        width = forest.parents.shape[1]
        index = np.arange(width)
        real = forest.depths > 0
        assert (forest.parents[real] < np.broadcast_to(index, real.shape)[real]).all()
        first = np.where(real, forest.depths, 99)
        assert (np.diff(first, axis=1) >= 0).all()
        above = np.take_along_axis(forest.depths, np.maximum(forest.parents, 0), 1)
        above = np.where(forest.parents >= 0, above, 0)
        assert (forest.depths[real] == above[real] + 1).all()
        # Correct nodes make one path.
        assert (forest.is_correct.sum(1) == forest.num_correct).all()
        assert (forest.is_correct.sum(1) <= forest.depths.max(1)).all()


def test_a_made_up_recording_looks_like_a_real_one(recording):
    """1,500 positions: shares are good to 0.04 (3 sigma), dependence aside."""
    trees = recording.trees
    first = trees.is_correct[:, :3].mean(0)
    assert 0.45 < first[0] < 0.65
    assert 0.12 < first[1] < 0.28
    # Over-confident: it says more than comes true.
    assert recording.chains.probs[:, 0].mean() > 0.03 + first[0]
    assert trees.max_depth == recording.chains.max_depth == 8
    assert trees.num_nodes_to[:, 4].max() == 30
