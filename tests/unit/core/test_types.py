"""The records refuse what they cannot hold, and name it; padding is not looked at."""

import dataclasses

import pytest
import torch

from sglang_tetris.core import AcceptResult, Allocation, DraftTrees, VerifyPlan


def fields(**changes):
    trees = {
        "tokens": torch.tensor([[5, 6, 7], [8, 9, 10]]),
        "parents": torch.tensor([[-1, 0, 0], [-1, -1, 1]]),
        "accept_probs": torch.tensor([[0.5, 1.0, 0.0], [0.25, 0.5, 0.75]]),
        "num_nodes": torch.tensor([3, 2]),
    }
    return trees | changes


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"tokens": [[1]]}, "tokens", "[[1]]"),
        ({"tokens": torch.tensor([1, 2, 3])}, "tokens", "[3]"),
        ({"tokens": torch.zeros(2, 3)}, "tokens", "float32"),
        ({"tokens": torch.zeros(2, 3, dtype=torch.int32)}, "tokens", "int32"),
        ({"parents": torch.tensor([[-1, 0], [-1, -1]])}, "parents", "[2, 2]"),
        ({"parents": torch.zeros(2, 3)}, "parents", "float32"),
        (
            {"parents": torch.tensor([[-1, 1, 0], [-1, -1, 1]])},
            "parents",
            "1 at [0, 1]",
        ),
        (
            {"parents": torch.tensor([[-1, 0, 0], [-2, 0, 1]])},
            "parents",
            "-2 at [1, 0]",
        ),
        ({"accept_probs": torch.zeros(2, 3).double()}, "accept_probs", "float64"),
        ({"accept_probs": torch.zeros(3, 2)}, "accept_probs", "[3, 2]"),
        ({"accept_probs": torch.full((2, 3), 1.5)}, "accept_probs", "1.5"),
        ({"accept_probs": torch.full((2, 3), -0.5)}, "accept_probs", "-0.5"),
        ({"accept_probs": torch.full((2, 3), torch.nan)}, "accept_probs", "nan"),
        ({"num_nodes": torch.tensor([3])}, "num_nodes", "[1]"),
        ({"num_nodes": torch.tensor([3, 2]).int()}, "num_nodes", "int32"),
        ({"num_nodes": torch.tensor([4, 2])}, "num_nodes", "4"),
        ({"num_nodes": torch.tensor([3, -1])}, "num_nodes", "-1"),
        ({"num_nodes": torch.tensor([3, 2], device="meta")}, "num_nodes", "meta"),
        ({"max_depth": -1}, "max_depth", "-1"),
    ],
)
def test_bad_trees(changes, name, value):
    with pytest.raises(ValueError, match=f"^{name} must ") as error:
        DraftTrees(**fields(**changes))
    assert value in str(error.value)


def test_other_probabilities():
    trees = DraftTrees(**fields(), max_depth=2)
    other = trees.with_accept_probs(torch.full((2, 3), 0.125))
    assert other.accept_probs.unique().tolist() == [0.125]
    assert trees.accept_probs.equal(fields()["accept_probs"])
    for name in ("tokens", "parents", "num_nodes", "max_depth"):
        assert getattr(other, name) is getattr(trees, name)
    for wrong in (torch.zeros(2, 2), torch.zeros(2, 3).double()):
        with pytest.raises(ValueError, match=r"^accept_probs must "):
            trees.with_accept_probs(wrong)


def test_padding_may_hold_anything():
    trees = DraftTrees(
        **fields(
            parents=torch.tensor([[-1, 0, 0], [-1, 0, 77]]),
            accept_probs=torch.tensor([[0.5, 1.0, 0.0], [0.25, 0.5, torch.nan]]),
        )
    )
    assert trees.is_node().tolist() == [[True] * 3, [True, True, False]]


def test_values_on_another_device_are_left_to_validate():
    """`meta` holds no values: reading any would raise."""
    other = {name: tensor.to("meta") for name, tensor in fields().items()}
    assert DraftTrees(**other).batch_size == 2


def test_records_are_frozen_slotted_and_keyword_only():
    for record in (DraftTrees, Allocation, VerifyPlan, AcceptResult):
        assert not hasattr(record, "__dict__") or "__slots__" in vars(record)
        with pytest.raises(TypeError):
            record(1, 2, 3, 4)
    trees = DraftTrees(**fields())
    with pytest.raises(dataclasses.FrozenInstanceError):
        trees.tokens = trees.parents


def test_allocation_shapes_and_lengths():
    keep = torch.tensor([[True, False], [True, True]])
    good = {
        "keep": keep,
        "verify_lens": torch.tensor([2, 3], dtype=torch.int32),
        "expected_correct_drafts": torch.zeros(2),
    }
    Allocation(**good).validate()
    for name, wrong, value in (
        ("keep", keep.int(), "int32"),
        ("verify_lens", torch.tensor([2, 3]), "int64"),
        ("expected_correct_drafts", torch.zeros(3), "[3]"),
    ):
        with pytest.raises(ValueError, match=f"^{name} must ") as error:
            Allocation(**good | {name: wrong})
        assert value in str(error.value)
    lens = torch.tensor([2, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^verify_lens .* got 2 at \[1\]"):
        Allocation(**good | {"verify_lens": lens}).validate()


def test_accept_result_lengths():
    good = {
        "accept_index": torch.tensor([[0, -1]], dtype=torch.int32),
        "accept_lens": torch.tensor([1], dtype=torch.int32),
        "accept_tokens": torch.tensor([[7, -1]]),
    }
    AcceptResult(**good).validate()
    assert AcceptResult(**good).num_correct_drafts.tolist() == [0]
    with pytest.raises(ValueError, match=r"^accept_tokens must "):
        AcceptResult(**good | {"accept_tokens": torch.tensor([[7]])})
    with pytest.raises(ValueError, match=r"^accept_lens must "):
        AcceptResult(**good | {"accept_lens": torch.tensor([2]).int()}).validate()
