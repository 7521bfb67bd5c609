"""match_tree: follows the target's tokens, and nothing else."""

import numpy as np
import pytest
import torch

from sglang_tetris.core import (
    AcceptResult,
    build_verify_plan,
    match_tree,
    select_draft_tokens,
)
from tests.reference import accept
from tests.reference.forests import forest, trees_of

pytestmark = pytest.mark.usefixtures("implementation")


def trimmed(tensor: torch.Tensor) -> list[list[int]]:
    return [[value for value in row if value != -1] for row in tensor.tolist()]


def check(result: AcceptResult, plan, rows, tokens) -> None:
    shape = (plan.batch_size, plan.max_depth + 1)
    assert result.accept_index.shape == result.accept_tokens.shape == shape
    assert result.accept_index.dtype == result.accept_lens.dtype == torch.int32
    assert result.accept_tokens.dtype == torch.int64
    assert trimmed(result.accept_index) == rows
    assert trimmed(result.accept_tokens) == tokens
    assert result.accept_lens.tolist() == [len(row) for row in rows]
    result.validate()


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("padded", [False, True])
def test_equals_the_reference(seed, padded):
    """Four tokens in the vocabulary: long paths and equal siblings are common."""
    rng = np.random.default_rng(seed)
    bs, max_nodes = int(rng.integers(1, 9)), int(rng.integers(1, 25))
    trees = forest(rng, bs, max_nodes)
    allocation = select_draft_tokens(
        trees, draft_budget=int(rng.integers(0, bs * max_nodes + 1))
    )
    rows = int(allocation.verify_lens.sum())
    bounds = {"total_verify_tokens": rows + 3, "num_mask_elements": rows**2 + 4}
    plan = build_verify_plan(
        trees,
        allocation,
        anchors=torch.zeros(bs, dtype=torch.int64),
        prefix_lens=torch.zeros(bs, dtype=torch.int64),
        **bounds if padded else {},
    )
    target = torch.from_numpy(rng.integers(0, 4, plan.input_ids.shape[0]))
    want = accept.match(trees, allocation.keep.tolist(), target[:rows].tolist())
    check(match_tree(plan, target), plan, *want)


def chain_plan():
    trees = trees_of([(1, -1, 0.9), (2, 0, 0.9), (3, 1, 0.9)], [(4, -1, 0.9)])
    return build_verify_plan(
        trees,
        select_draft_tokens(trees, draft_budget=4),
        anchors=torch.tensor([0, 0]),
        prefix_lens=torch.tensor([5, 5]),
    )


def test_a_chain_by_hand():
    plan = chain_plan()
    result = match_tree(plan, torch.tensor([1, 2, 9, 3, 9, 4]))
    assert result.accept_index.tolist() == [[0, 1, 2, -1], [4, -1, -1, -1]]
    assert result.accept_tokens.tolist() == [[1, 2, 9, -1], [9, -1, -1, -1]]
    assert result.accept_lens.tolist() == [3, 1]
    assert result.num_correct_drafts.tolist() == [2, 0]
    # A later row that agrees does not count once an earlier one did not.
    result = match_tree(plan, torch.tensor([9, 2, 3, 3, 4, 7]))
    assert result.accept_tokens.tolist() == [[9, -1, -1, -1], [4, 7, -1, -1]]
    # All accepted: the bonus token fills the last column.
    result = match_tree(plan, torch.tensor([1, 2, 3, 8, 9, 9]))
    assert result.accept_tokens.tolist()[0] == [1, 2, 3, 8]


def test_of_equal_siblings_the_lower_is_followed():
    # Only the higher sibling has the child that the target would take next.
    trees = trees_of([(5, -1, 0.9), (5, -1, 0.9), (6, 1, 0.9)])
    plan = build_verify_plan(
        trees,
        select_draft_tokens(trees, draft_budget=3),
        anchors=torch.tensor([0]),
        prefix_lens=torch.tensor([0]),
    )
    result = match_tree(plan, torch.tensor([5, 6, 6, 7]))
    assert trimmed(result.accept_index) == [[0, 1]]
    assert trimmed(result.accept_tokens) == [[5, 6]]


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (3, 0)])
@pytest.mark.parametrize("bounds", [None, (6, 9)])
def test_empty(shape, bounds):
    bs = shape[0]
    trees = forest(np.random.default_rng(0), *shape)
    plan = build_verify_plan(
        trees,
        select_draft_tokens(trees, draft_budget=0),
        anchors=torch.zeros(bs, dtype=torch.int64),
        prefix_lens=torch.zeros(bs, dtype=torch.int64),
        total_verify_tokens=bounds and bounds[0],
        num_mask_elements=bounds and bounds[1],
    )
    target = torch.full_like(plan.input_ids, 8)
    rows = [[row] for row in range(bs)]
    check(match_tree(plan, target), plan, rows, [[8]] * bs)


@pytest.mark.parametrize(
    ("target", "value"),
    [
        (torch.zeros(5, dtype=torch.int64), "[5]"),
        (torch.zeros(6, dtype=torch.int32), "int32"),
        (torch.zeros(6, 1, dtype=torch.int64), "[6, 1]"),
        ([0] * 6, "[0, 0, 0, 0, 0, 0]"),
    ],
)
def test_bad_target_tokens(target, value):
    with pytest.raises(ValueError, match=r"^target_tokens must ") as error:
        match_tree(chain_plan(), target)
    assert value in str(error.value)
