"""labelled_nodes: verified, under a correct parent, once per token; nothing else."""

import numpy as np
import pytest
import torch

from sglang_tetris.core import (
    DraftTrees,
    build_verify_plan,
    depths_and_ranks,
    labelled_nodes,
    match_tree,
    select_draft_tokens,
)
from tests.reference import calibration
from tests.reference.forests import forest, trees_of

pytestmark = pytest.mark.usefixtures("implementation")


def verify(trees, budget, target_of, **bounds):
    """Run a round; `target_of(num_rows)` gives the target's tokens."""
    allocation = select_draft_tokens(trees, draft_budget=budget)
    zeros = torch.zeros(trees.batch_size, dtype=torch.int64)
    plan = build_verify_plan(
        trees, allocation, anchors=zeros, prefix_lens=zeros, **bounds
    )
    target = target_of(plan.input_ids.shape[0])
    return allocation, plan, target, match_tree(plan, target)


def test_an_example():
    # Survivals .6 .3 .1 .3 .12 .03: a budget of five trims the last node.
    trees = trees_of(
        [
            (11, -1, 0.6),
            (12, -1, 0.3),
            (13, -1, 0.1),
            (21, 0, 0.5),
            (22, 1, 0.4),
            (31, 3, 0.1),
        ]
    )
    rows = torch.tensor([11, 21, 0, 0, 31, 0])
    _, plan, _, accepted = verify(trees, 5, lambda _: rows)
    labels = labelled_nodes(trees, plan, accepted)
    # Node 4 hangs on a wrong one; node 5, right as it was, was not verified.
    assert labels.probs.tolist() == pytest.approx([0.6, 0.3, 0.1, 0.5])
    assert labels.correct.tolist() == [True, False, False, True]
    assert labels.depths.tolist() == [1, 1, 1, 2]
    assert labels.ranks.tolist() == [0, 1, 2, 0]
    assert labels.requests.tolist() == [0, 0, 0, 0]
    kinds = [np.float32, np.int64, np.int64, np.int64, np.bool_]
    assert [part.dtype for part in labels] == kinds


def test_of_equal_siblings_the_lower_is_labelled():
    trees = trees_of([(7, -1, 0.2), (7, -1, 0.5), (8, 1, 0.5), (7, 0, 0.5)])
    _, plan, _, accepted = verify(trees, 4, lambda _: torch.tensor([7] * 5))
    labels = labelled_nodes(trees, plan, accepted)
    assert labels.probs.tolist() == pytest.approx([0.2, 0.5])
    assert (labels.ranks.tolist(), labels.depths.tolist()) == ([1, 0], [1, 2])
    # With the lower one trimmed, the other is the one that is compared.
    _, plan, _, accepted = verify(trees, 1, lambda _: torch.tensor([7, 0]))
    labels = labelled_nodes(trees, plan, accepted)
    assert labels.probs.tolist() == [0.5]
    assert labels.correct.tolist() == [True]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(15))
def test_equals_the_reference(seed, padded):
    rng = np.random.default_rng(seed)
    trees = forest(rng, bs=6, max_nodes=14)
    bounds = (
        {"total_verify_tokens": 6 + 50, "num_mask_elements": 6 * 15**2}
        if padded
        else {}
    )
    allocation, plan, target, accepted = verify(
        trees,
        int(rng.integers(0, 50)),
        lambda rows: torch.from_numpy(rng.integers(0, 4, rows)),
        **bounds,
    )
    got = labelled_nodes(trees, plan, accepted)
    want = calibration.labels(trees, allocation.keep.tolist(), target.tolist())
    requests, nodes, correct = (list(part) for part in zip(*want, strict=True))
    assert got.requests.tolist() == requests
    assert got.correct.tolist() == correct
    depths, ranks = depths_and_ranks(trees)
    for have, table in zip(got, (trees.accept_probs, depths, ranks), strict=False):
        assert np.array_equal(have, table[requests, nodes].numpy())


def test_requests_that_are_not_usable_are_left_out():
    trees = forest(np.random.default_rng(4), bs=5, max_nodes=9)
    _, plan, _, accepted = verify(trees, 30, lambda rows: torch.zeros(rows).long())
    everything = labelled_nodes(trees, plan, accepted)
    usable = torch.tensor([True, False, True, False, False])
    some = labelled_nodes(trees, plan, accepted, usable=usable)
    chosen = np.isin(everything.requests, [0, 2])
    assert 0 < chosen.sum() < len(chosen)
    for part, whole in zip(some, everything, strict=True):
        assert np.array_equal(part, whole[chosen])


def test_rates_by_depth_are_conditional():
    """400 requests, chains of 3 of which each node is right with probability 1/2.

    A rate has standard error .5 / sqrt(n), n = 400, about 200 and about 100; with 5 of
    them the false-alarm rate is below 2e-6 per seed. Labels from under wrong parents
    would give depth 3 a rate of 1/8.
    """
    rng = np.random.default_rng(0)
    bs = 400
    trees = DraftTrees(
        tokens=torch.ones(bs, 3, dtype=torch.int64),
        parents=torch.tensor([[-1, 0, 1]]).expand(bs, 3).contiguous(),
        accept_probs=torch.full((bs, 3), 0.5),
        num_nodes=torch.full((bs,), 3),
    )
    _, plan, _, accepted = verify(
        trees, 3 * bs, lambda rows: torch.from_numpy(rng.integers(0, 2, rows))
    )
    labels = labelled_nodes(trees, plan, accepted)
    for depth in (1, 2, 3):
        correct = labels.correct[labels.depths == depth]
        assert abs(correct.mean() - 0.5) < 5 * 0.5 / len(correct) ** 0.5
    assert 150 < (labels.depths == 2).sum() < 250


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0), (3, 4)])
def test_rounds_without_labels(shape):
    trees = forest(np.random.default_rng(0), *shape)
    _, plan, _, accepted = verify(trees, 0, lambda rows: torch.zeros(rows).long())
    assert [len(part) for part in labelled_nodes(trees, plan, accepted)] == [0] * 5


def test_arguments_that_do_not_belong_together():
    trees = forest(np.random.default_rng(1), bs=3, max_nodes=8)
    other = forest(np.random.default_rng(1), bs=2, max_nodes=8)
    _, plan, _, accepted = verify(trees, 20, lambda rows: torch.zeros(rows).long())
    with pytest.raises(ValueError, match=r"plan must be of 2 requests.* got 3"):
        labelled_nodes(other, plan, accepted)
    _, other_plan, _, _ = verify(other, 1, lambda rows: torch.zeros(rows).long())
    with pytest.raises(ValueError, match=r"accepted must be of 2 requests.* got 3"):
        labelled_nodes(other, other_plan, accepted)
    with pytest.raises(ValueError, match="usable must have shape"):
        labelled_nodes(trees, plan, accepted, usable=torch.ones(2).bool())
    narrow = DraftTrees(
        tokens=trees.tokens[:, :1].contiguous(),
        parents=trees.parents[:, :1].contiguous(),
        accept_probs=trees.accept_probs[:, :1].contiguous(),
        num_nodes=trees.num_nodes.clamp(max=1),
    )
    with pytest.raises(ValueError, match=r"node_ids must be below 1, .* got"):
        labelled_nodes(narrow, plan, accepted)
    _, short, _, _ = verify(trees, 0, lambda rows: torch.zeros(rows).long())
    with pytest.raises(ValueError, match=r"accept_index must be below 3, .* got"):
        labelled_nodes(trees, short, accepted)
