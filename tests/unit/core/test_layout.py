"""build_verify_plan: rows, links, masks; padding to sizes that the host knows."""

import dataclasses

import numpy as np
import pytest
import torch

from sglang_tetris.core import (
    Allocation,
    DraftTrees,
    VerifyPlan,
    build_verify_plan,
    select_draft_tokens,
)
from tests.reference import layout
from tests.reference.forests import forest, trees_of

pytestmark = pytest.mark.usefixtures("implementation")

# Whether arguments fit each other is checked where reading them waits for nothing, that
# is by the CPU's implementations; the kernels only stay inside the memory.
reads_values = pytest.mark.parametrize(
    "implementation", ["numba", "torch"], indirect=True
)

DTYPES = {"qo_indptr": torch.int32, "tree_mask": torch.bool}


def random_case(seed: int) -> tuple[DraftTrees, Allocation, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    bs, max_nodes = int(rng.integers(1, 9)), int(rng.integers(0, 25))
    trees = forest(rng, bs, max_nodes)
    budget = int(rng.integers(0, bs * max_nodes + 1))
    anchors = torch.from_numpy(rng.integers(100, 200, bs))
    prefix_lens = torch.from_numpy(rng.integers(0, 6, bs))
    return trees, select_draft_tokens(trees, draft_budget=budget), anchors, prefix_lens


def assert_holds(plan: VerifyPlan, want: dict[str, list]) -> None:
    for name, value in want.items():
        if name == "custom_mask":
            assert plan.custom_mask().tolist() == value
        elif name == "max_depth":
            assert plan.max_depth == value
        else:
            got = getattr(plan, name)
            assert got.dtype == DTYPES.get(name, torch.int64), name
            assert got.tolist() == value, name


def test_a_small_tree_by_hand():
    # Nodes 1 and 3 are children of 0, node 2 is trimmed; a second request is bare.
    trees = trees_of(
        [(11, -1, 1.0), (12, 0, 0.9), (13, -1, 0.0), (14, 0, 0.8)], [(15, -1, 0.0)]
    )
    plan = build_verify_plan(
        trees,
        select_draft_tokens(trees, draft_budget=3),
        anchors=torch.tensor([100, 200]),
        prefix_lens=torch.tensor([2, 0]),
    )
    assert plan.input_ids.tolist() == [100, 11, 12, 14, 200]
    assert plan.positions.tolist() == [2, 3, 4, 4, 0]
    assert plan.qo_indptr.tolist() == [0, 4, 5]
    assert plan.verify_lens.tolist() == [4, 1]
    assert plan.node_ids.tolist() == [-1, 0, 1, 3, -1]
    assert plan.retrieve_index.tolist() == [[0, 1, 2, 3], [4, -1, -1, -1]]
    assert plan.retrieve_next_token.tolist() == [[1, 2, -1, -1], [-1] * 4]
    assert plan.retrieve_next_sibling.tolist() == [[-1, -1, 3, -1], [-1] * 4]
    assert plan.retrieve_parent.tolist() == [[-1, 0, 1, 1], [-1] * 4]
    assert plan.max_depth == 2
    block = ["1000", "1100", "1110", "1101"]
    tree = [mark == "1" for row in block for mark in row]
    assert plan.tree_mask.tolist() == [*tree, True]
    with_prefix = [mark == "1" for row in block for mark in "11" + row]
    assert plan.custom_mask().tolist() == [*with_prefix, True]


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_reference(seed):
    trees, allocation, anchors, prefix_lens = random_case(seed)
    plan = build_verify_plan(
        trees, allocation, anchors=anchors, prefix_lens=prefix_lens
    )
    want = layout.plan(
        trees, allocation.keep.tolist(), anchors.tolist(), prefix_lens.tolist()
    )
    assert_holds(plan, want)
    plan.validate()


@pytest.mark.parametrize("seed", range(20))
def test_padding_changes_sizes_only(seed):
    trees, allocation, anchors, prefix_lens = random_case(seed)
    arguments = {"anchors": anchors, "prefix_lens": prefix_lens}
    exact = build_verify_plan(trees, allocation, **arguments)
    rows, elements = exact.input_ids.shape[0], exact.tree_mask.shape[0]
    padded = build_verify_plan(
        trees,
        allocation,
        **arguments,
        total_verify_tokens=rows + 5,
        num_mask_elements=elements + 11,
    )
    for name, filler in (("input_ids", 0), ("positions", 0), ("node_ids", -1)):
        got, want = getattr(padded, name).tolist(), getattr(exact, name).tolist()
        assert got == want + [filler] * 5
    assert padded.tree_mask.tolist() == exact.tree_mask.tolist() + [False] * 11
    assert padded.qo_indptr.equal(exact.qo_indptr)
    width = min(trees.max_nodes, rows + 5 - trees.batch_size) + 1
    assert padded.max_depth == width - 1
    for name in ("index", "next_token", "next_sibling", "parent"):
        got = getattr(padded, f"retrieve_{name}")
        want = getattr(exact, f"retrieve_{name}")
        assert got.shape == (trees.batch_size, width)
        assert got[:, : want.shape[1]].equal(want)
        assert (got[:, want.shape[1] :] == -1).all()
    mask = exact.custom_mask()
    assert padded.custom_mask().equal(mask)
    longer = padded.custom_mask(num_elements=mask.shape[0] + 3)
    assert longer.tolist() == mask.tolist() + [False] * 3
    padded.validate()


def test_padded_shapes_do_not_depend_on_the_values():
    trees = forest(np.random.default_rng(0), 4, 9)
    shapes = set()
    for budget in (0, 7, 100):
        plan = build_verify_plan(
            trees,
            select_draft_tokens(trees, draft_budget=budget),
            anchors=torch.zeros(4, dtype=torch.int64),
            prefix_lens=torch.zeros(4, dtype=torch.int64),
            total_verify_tokens=40,
            num_mask_elements=400,
        )
        tensors = [getattr(plan, field.name) for field in dataclasses.fields(plan)]
        shapes.add(tuple(getattr(tensor, "shape", tensor) for tensor in tensors))
    assert len(shapes) == 1


def test_a_depth_bound_narrows_the_padded_plan():
    trees = trees_of([(1, -1, 0.5), (2, -1, 0.5), (3, 0, 0.5)])
    bounded = dataclasses.replace(trees, max_depth=2)
    plan = build_verify_plan(
        bounded,
        select_draft_tokens(bounded, draft_budget=3),
        anchors=torch.tensor([9]),
        prefix_lens=torch.tensor([0]),
        total_verify_tokens=8,
        num_mask_elements=64,
    )
    assert plan.max_depth == 2


def test_int32_anchors_and_prefix_lens():
    trees, allocation, anchors, prefix_lens = random_case(3)
    wide = build_verify_plan(
        trees, allocation, anchors=anchors, prefix_lens=prefix_lens
    )
    narrow = build_verify_plan(
        trees, allocation, anchors=anchors.int(), prefix_lens=prefix_lens.int()
    )
    assert narrow.input_ids.equal(wide.input_ids)
    assert narrow.positions.equal(wide.positions)
    assert narrow.prefix_lens.dtype == torch.int64


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (3, 0)])
@pytest.mark.parametrize("bounds", [None, (6, 9)])
def test_empty(shape, bounds):
    bs = shape[0]
    trees = forest(np.random.default_rng(0), *shape)
    plan = build_verify_plan(
        trees,
        select_draft_tokens(trees, draft_budget=2),
        anchors=torch.full((bs,), 7),
        prefix_lens=torch.full((bs,), 2),
        total_verify_tokens=bounds and bounds[0],
        num_mask_elements=bounds and bounds[1],
    )
    rows, elements = bounds or (bs, bs)
    assert plan.input_ids.tolist() == [7] * bs + [0] * (rows - bs)
    assert plan.tree_mask.tolist() == [True] * bs + [False] * (elements - bs)
    assert plan.qo_indptr.tolist() == list(range(bs + 1))
    assert plan.custom_mask().tolist() == [True] * 3 * bs
    assert plan.retrieve_index.shape[0] == bs


def small() -> tuple[DraftTrees, Allocation]:
    trees = trees_of([(1, -1, 0.9), (2, 0, 0.9)], [(3, -1, 0.1)])
    return trees, select_draft_tokens(trees, draft_budget=3)


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        ({"anchors": torch.zeros(3, dtype=torch.int64)}, "anchors", "[3]"),
        ({"anchors": torch.zeros(2)}, "anchors", "torch.float32"),
        (
            {"prefix_lens": torch.zeros(2, 1, dtype=torch.int64)},
            "prefix_lens",
            "[2, 1]",
        ),
        ({"total_verify_tokens": 4}, "total_verify_tokens", "4"),
        ({"total_verify_tokens": 1}, "total_verify_tokens", "1"),
        ({"total_verify_tokens": 4.5}, "total_verify_tokens", "4.5"),
        ({"num_mask_elements": 12}, "num_mask_elements", "12"),
        (
            {"num_mask_elements": 99, "total_verify_tokens": 4},
            "total_verify_tokens",
            "4",
        ),
        (
            {"num_mask_elements": 12, "total_verify_tokens": 9},
            "num_mask_elements",
            "12",
        ),
    ],
)
def test_bad_arguments(arguments, name, value):
    trees, allocation = small()
    zeros = torch.zeros(2, dtype=torch.int64)
    good = {"anchors": zeros, "prefix_lens": zeros}
    with pytest.raises(ValueError, match=f"^{name} must ") as error:
        build_verify_plan(trees, allocation, **good | arguments)
    assert f"got {value}" in str(error.value)


@reads_values
def test_a_negative_prefix():
    trees, allocation = small()
    anchors = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^prefix_lens must .* got -5 at \[1\]"):
        build_verify_plan(
            trees, allocation, anchors=anchors, prefix_lens=torch.tensor([0, -5])
        )


@reads_values
@pytest.mark.parametrize(
    ("keep", "verify_lens", "message"),
    [
        ([[False, True], [True, False]], [2, 2], r"allocation.keep .* \[0, 1\]"),
        ([[True, True], [True, True]], [3, 3], r"allocation.keep .* \[1, 1\]"),
        ([[True, True], [True, False]], [3, 3], r"verify_lens .* 3 at \[1\]"),
        ([[True], [True]], [2, 2], r"allocation.keep .* \[2, 1\]"),
    ],
)
def test_an_allocation_that_does_not_fit(keep, verify_lens, message):
    trees, _ = small()
    zeros = torch.zeros(2, dtype=torch.int64)
    bad = Allocation(
        keep=torch.tensor(keep),
        verify_lens=torch.tensor(verify_lens, dtype=torch.int32),
        expected_correct_drafts=torch.zeros(2),
    )
    with pytest.raises(ValueError, match=message):
        build_verify_plan(trees, bad, anchors=zeros, prefix_lens=zeros)


@reads_values
@pytest.mark.parametrize("parent", [-1, 0, 2**40])
def test_padding_that_is_kept(parent):
    trees = trees_of([(1, -1, 0.9), (2, -1, 0.9)])
    trees = dataclasses.replace(
        trees, parents=torch.tensor([[-1, parent]]), num_nodes=torch.tensor([1])
    )
    bad = Allocation(
        keep=torch.tensor([[True, True]]),
        verify_lens=torch.tensor([3], dtype=torch.int32),
        expected_correct_drafts=torch.zeros(1),
    )
    zero = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^allocation.keep .* padding.* \[0, 1\]"):
        build_verify_plan(trees, bad, anchors=zero, prefix_lens=zero)


@reads_values
def test_a_depth_bound_that_does_not_hold():
    trees, allocation = small()
    zeros = torch.zeros(2, dtype=torch.int64)
    shallow = dataclasses.replace(trees, max_depth=1)
    with pytest.raises(ValueError, match=r"^max_depth must .* got 1 .* \[0, 1\]"):
        build_verify_plan(shallow, allocation, anchors=zeros, prefix_lens=zeros)
