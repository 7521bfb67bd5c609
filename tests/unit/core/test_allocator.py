"""select_draft_tokens: optimal, exact in number, deterministic in its ties."""

import itertools

import numpy as np
import pytest
import torch

from sglang_tetris.core import Allocation, DraftTrees, select_draft_tokens
from tests.reference import selection
from tests.reference.forests import forest, trees_of

pytestmark = pytest.mark.usefixtures("implementation")

# Dyadic, so that products and sums are exact and equal values are really equal.
LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)


def keep_of(allocation: Allocation) -> list[list[bool]]:
    return allocation.keep.tolist()


def assert_closed(trees: DraftTrees, keep: list[list[bool]]) -> None:
    for request, row in enumerate(keep):
        for node, kept in enumerate(row):
            if kept:
                assert node < trees.num_nodes[request]
                parent = trees.parents[request, node]
                assert parent < 0 or row[parent]


def available(trees: DraftTrees, caps: list[int] | None) -> int:
    counts = trees.num_nodes.tolist()
    return sum(counts if caps is None else map(min, counts, caps))


def best_total(
    trees: DraftTrees,
    budget: int,
    caps: list[int] | None,
    weights: np.ndarray | None,
    floors: list[int] | None,
) -> float:
    """The optimum by search: under the floors, or within them where they cost more."""
    if floors is not None and budget < available(trees, limits(caps, floors)):
        caps, floors = limits(caps, floors), None
    best = selection.best_totals(trees, caps, weights, floors)
    return best[min(budget, available(trees, caps))]


def limits(caps: list[int] | None, floors: list[int]) -> list[int]:
    return floors if caps is None else list(map(min, caps, floors))


@pytest.mark.parametrize("seed", range(20))
def test_equals_exhaustive_search(seed, some):
    """100 forests per seed, half of them with caps, with weights, with floors."""
    rng = np.random.default_rng(seed)
    for _ in some(range(100)):
        bs = int(rng.integers(1, 4))
        trees = forest(rng, bs, int(rng.integers(1, 6)), LEVELS)
        caps = rng.integers(0, 6, bs).tolist() if rng.random() < 0.5 else None
        weights = None
        if rng.random() < 0.5:
            weights = rng.choice([0.5, 1.0, 2.0], bs).astype(np.float32)
        floors = rng.integers(0, 5, bs).tolist() if rng.random() < 0.5 else None
        budget = int(rng.integers(0, 14))
        got = select_draft_tokens(
            trees,
            draft_budget=budget,
            max_drafts=None if caps is None else torch.tensor(caps),
            weights=None if weights is None else torch.from_numpy(weights),
            min_drafts=None if floors is None else torch.tensor(floors),
        )
        keep = keep_of(got)
        assert_closed(trees, keep)
        assert sum(map(sum, keep)) == min(budget, available(trees, caps))
        assert keep == selection.select(trees, budget, caps, weights, floors)
        values = selection.survival(trees)
        plain = [
            sum(float(v) for v, kept in zip(*pair, strict=True) if kept)
            for pair in zip(values, keep, strict=True)
        ]
        assert got.expected_correct_drafts.tolist() == plain
        weighted = plain if weights is None else np.array(plain) * weights
        assert sum(weighted) == best_total(trees, budget, caps, weights, floors)


@pytest.mark.parametrize("seed", range(30))
def test_equals_the_reference_where_rounding_decides(seed, some):
    rng = np.random.default_rng(seed)
    bs, max_nodes = int(rng.integers(1, 12)), int(rng.integers(1, 40))
    trees = forest(rng, bs, max_nodes, LEVELS if seed % 3 == 0 else ())
    weights = np.exp(rng.normal(size=bs)).astype(np.float32)
    caps = rng.integers(0, max_nodes + 3, bs)
    floors = rng.integers(0, max_nodes // 2 + 2, bs)
    budgets = (0, 1, bs, 3 * bs, bs * max_nodes // 2, 10**12)
    given = itertools.product(budgets, (None, caps), (None, weights), (None, floors))
    for budget, some_caps, some_weights, some_floors in some(given):
        got = select_draft_tokens(
            trees,
            draft_budget=budget,
            max_drafts=None if some_caps is None else torch.from_numpy(caps),
            weights=None if some_weights is None else torch.from_numpy(weights),
            min_drafts=None if some_floors is None else torch.from_numpy(floors),
        )
        want = selection.select(trees, budget, some_caps, some_weights, some_floors)
        assert keep_of(got) == want
        assert_closed(trees, want)
        assert got.verify_lens.tolist() == [1 + sum(row) for row in want]


def test_ties_go_to_shallower_then_request_then_node():
    # All survivals are 0.5: node 2 of request 0 and both of request 1 are at depth 1.
    trees = trees_of(
        [(1, -1, 0.5), (2, 0, 1.0), (3, -1, 0.5)], [(4, -1, 0.5), (5, -1, 0.5)]
    )
    order = [(0, 0), (0, 2), (1, 0), (1, 1), (0, 1)]
    for budget in range(6):
        keep = select_draft_tokens(trees, draft_budget=budget).keep
        assert sorted(map(tuple, keep.nonzero().tolist())) == sorted(order[:budget])


def test_equal_nodes_are_taken_in_the_order_of_the_batch():
    trees = trees_of(*[[(1, -1, 0.5)] * 10] * 9)
    keep = select_draft_tokens(trees, draft_budget=47).keep
    assert keep.flatten().tolist() == [True] * 47 + [False] * 43


def test_ties_are_those_of_the_weighted_value():
    trees = trees_of([(1, -1, 0.25), (2, 0, 1.0)], [(3, -1, 0.5)])
    weights = torch.tensor([2.0, 1.0])
    keep = select_draft_tokens(trees, draft_budget=2, weights=weights).keep
    assert keep.tolist() == [[True, False], [True, False]]


def test_weights_move_the_budget_but_not_the_expectation():
    trees = trees_of([(1, -1, 0.9)], [(2, -1, 0.5)])
    got = select_draft_tokens(trees, draft_budget=1, weights=torch.tensor([1.0, 4.0]))
    assert got.keep.tolist() == [[False], [True]]
    assert got.expected_correct_drafts.tolist() == [0.0, 0.5]


def test_hopeless_nodes_are_admitted_when_the_budget_reaches_them():
    trees = trees_of([(1, -1, 0.0), (2, 0, 1.0)], [(3, -1, 0.5)], max_nodes=4)
    got = select_draft_tokens(trees, draft_budget=9)
    assert got.keep.tolist() == [[True, True, False, False], [True] + [False] * 3]
    assert got.verify_lens.tolist() == [3, 2]
    assert got.verify_lens.dtype == torch.int32


def test_negative_zero_ties_with_zero():
    trees = trees_of([(1, -1, -0.0)], [(2, -1, 0.0)])
    keep = select_draft_tokens(trees, draft_budget=1).keep
    assert keep.tolist() == [[True], [False]]


def test_a_cap_for_all_equals_the_same_cap_each(some):
    trees = forest(np.random.default_rng(1), 5, 9)
    for cap in some((0, 1, 4, 100)):
        one = select_draft_tokens(trees, draft_budget=12, max_drafts=cap)
        each = torch.full((5,), cap, dtype=torch.int32)
        many = select_draft_tokens(trees, draft_budget=12, max_drafts=each)
        assert one.keep.equal(many.keep)
        assert int(one.keep.sum(1).max()) <= cap


def test_a_floor_goes_before_everything_else():
    # Request 1 is hopeless; without a floor it gets nothing before request 0 has all.
    trees = trees_of(
        [(1, -1, 0.9), (2, 0, 0.9), (3, 0, 0.5)], [(4, -1, 0.0), (5, -1, 0.1)], []
    )
    order = [(0, 0), (1, 1), (0, 1), (0, 2), (1, 0)]
    for budget in range(6):
        keep = select_draft_tokens(trees, draft_budget=budget, min_drafts=1).keep
        assert sorted(map(tuple, keep.nonzero().tolist())) == sorted(order[:budget])


def test_a_floor_stops_at_the_cap_and_at_the_nodes_there_are():
    trees = trees_of([(1, -1, 0.1), (2, 0, 0.1)], [(3, -1, 0.9)], [(4, -1, 0.8)] * 3)
    got = select_draft_tokens(
        trees,
        draft_budget=4,
        max_drafts=torch.tensor([1, 9, 9]),
        min_drafts=torch.tensor([2, 2, 0], dtype=torch.int32),
    )
    assert got.verify_lens.tolist() == [2, 2, 3]


def test_one_floor_for_all_is_the_floor_of_each(some):
    trees = forest(np.random.default_rng(5), 5, 9, LEVELS)
    for floor in some((0, 1, 3, 100)):
        one = select_draft_tokens(trees, draft_budget=14, min_drafts=floor)
        each = torch.full((5,), floor, dtype=torch.int32)
        many = select_draft_tokens(trees, draft_budget=14, min_drafts=each)
        assert one.keep.equal(many.keep)
        if floor == 0:
            none = select_draft_tokens(trees, draft_budget=14)
            assert one.keep.equal(none.keep)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_budget_may_be_a_scalar_tensor(dtype):
    trees = forest(np.random.default_rng(2), 4, 8)
    for budget in (0, 5, 1000):
        scalar = torch.tensor(budget, dtype=dtype)
        got = select_draft_tokens(trees, draft_budget=scalar)
        assert got.keep.equal(select_draft_tokens(trees, draft_budget=budget).keep)


def test_more_budget_keeps_what_less_kept(some):
    trees = forest(np.random.default_rng(3), 6, 20, LEVELS)
    budgets = some(range(0, 120, 7))
    keeps = [select_draft_tokens(trees, draft_budget=b).keep for b in budgets]
    for less, more in itertools.pairwise(keeps):
        assert not (less & ~more).any()


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
def test_empty(shape):
    bs = shape[0]
    got = select_draft_tokens(
        forest(np.random.default_rng(0), *shape),
        draft_budget=4,
        max_drafts=torch.ones(bs, dtype=torch.int64),
        weights=torch.ones(bs),
        min_drafts=torch.ones(bs, dtype=torch.int64),
    )
    assert got.keep.shape == shape
    assert got.verify_lens.tolist() == [1] * bs
    assert got.expected_correct_drafts.tolist() == [0.0] * bs


def test_rows_of_nothing_but_padding():
    got = select_draft_tokens(trees_of([], [(1, -1, 0.1)], []), draft_budget=2)
    assert got.verify_lens.tolist() == [1, 2, 1]


def test_strided_arguments_and_narrow_weights():
    trees = forest(np.random.default_rng(4), 4, 8)
    wide = DraftTrees(
        tokens=trees.tokens.repeat_interleave(2, 1)[:, ::2],
        parents=trees.parents.t().contiguous().t(),
        accept_probs=trees.accept_probs.repeat_interleave(2, 1)[:, ::2],
        num_nodes=trees.num_nodes.repeat_interleave(2)[::2],
    )
    weights = torch.tensor([0.5, 1.0, 2.0, 1.5])
    want = select_draft_tokens(trees, draft_budget=9, weights=weights)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        got = select_draft_tokens(wide, draft_budget=9, weights=weights.to(dtype))
        assert got.keep.equal(want.keep)


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        ({"draft_budget": -3}, "draft_budget", "-3"),
        ({"draft_budget": torch.tensor(-4)}, "draft_budget", "-4"),
        ({"draft_budget": 2.5}, "draft_budget", "2.5"),
        ({"draft_budget": True}, "draft_budget", "True"),
        ({"draft_budget": None}, "draft_budget", "None"),
        ({"draft_budget": torch.tensor([1])}, "draft_budget", "[1]"),
        ({"draft_budget": torch.tensor(1.0)}, "draft_budget", "float32"),
        ({"max_drafts": -1}, "max_drafts", "-1"),
        ({"max_drafts": torch.tensor([1, -6])}, "max_drafts", "-6"),
        ({"max_drafts": torch.tensor([1])}, "max_drafts", "[1]"),
        ({"max_drafts": torch.tensor([1.0, 2.0])}, "max_drafts", "float32"),
        ({"min_drafts": -2}, "min_drafts", "-2"),
        ({"min_drafts": torch.tensor([-7, 1])}, "min_drafts", "-7"),
        ({"min_drafts": torch.tensor([[1, 1]])}, "min_drafts", "[1, 2]"),
        ({"min_drafts": torch.tensor([0.5, 1.0])}, "min_drafts", "float32"),
        ({"weights": torch.tensor([1.0, 0.0])}, "weights", "0.0"),
        ({"weights": torch.tensor([1.0, -2.0])}, "weights", "-2.0"),
        ({"weights": torch.tensor([1.0, float("nan")])}, "weights", "nan"),
        ({"weights": torch.tensor([1.0, float("inf")])}, "weights", "inf"),
        ({"weights": torch.tensor([1.0])}, "weights", "[1]"),
        ({"weights": torch.tensor([1, 2])}, "weights", "int64"),
        ({"weights": [1.0, 2.0]}, "weights", "[1.0, 2.0]"),
    ],
)
def test_bad_arguments(arguments, name, value):
    trees = trees_of([(1, -1, 0.5)], [(2, -1, 0.5)])
    with pytest.raises(ValueError, match=f"^{name} ") as error:
        select_draft_tokens(trees, **({"draft_budget": 1} | arguments))
    assert value in str(error.value)
