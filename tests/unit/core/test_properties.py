"""Properties that hold for every forest, budget, cap, floor and weight.

Hypothesis searches for a counterexample and shrinks it; derandomised, so that a run of
the tests is the same every time. Trees are small, probabilities often equal or extreme,
and padding holds garbage.
"""

import dataclasses
import os

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from sglang_tetris.core import (
    AcceptResult,
    Allocation,
    DraftTrees,
    VerifyPlan,
    build_verify_plan,
    match_tree,
    path_survival,
    select_draft_tokens,
)
from tests.reference import accept, selection

pytestmark = pytest.mark.usefixtures("implementation")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # some 0.1 s a call

# The fixture chooses an implementation for the whole test: it need not start afresh.
searched = settings(
    derandomize=True,
    deadline=None,
    max_examples=12 if INTERPRETED else 40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

# Arguments are checked before an implementation is chosen.
once = pytest.mark.parametrize("implementation", ["numba"], indirect=True)

MAX_BS, MAX_NODES = 4, 7
# Exact ties, zeros and ones as often as anything in between.
PROBS = st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.floats(0, 1, width=32)
WEIGHTS = st.sampled_from([0.5, 1.0, 2.0]) | st.floats(2**-20, 2**20, width=32)
NOT_A_PROB = st.sampled_from([float("nan"), -(2.0**-149), 1 + 2.0**-23, float("inf")])
NOT_A_WEIGHT = st.sampled_from([0.0, -1.0, float("nan"), float("inf"), -float("inf")])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Trees, a budget for them, and what may limit or weigh their requests."""

    trees: DraftTrees
    budget: int
    max_drafts: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    min_drafts: torch.Tensor | None = None

    def select(self, extra: int = 0) -> Allocation:
        return select_draft_tokens(
            self.trees,
            draft_budget=self.budget + extra,
            max_drafts=self.max_drafts,
            weights=self.weights,
            min_drafts=self.min_drafts,
        )

    def with_probs(self, probs: torch.Tensor) -> "Batch":
        return dataclasses.replace(
            self, trees=dataclasses.replace(self.trees, accept_probs=probs)
        )

    def permuted(self, order: list[int]) -> "Batch":
        trees = DraftTrees(
            tokens=self.trees.tokens[order],
            parents=self.trees.parents[order],
            accept_probs=self.trees.accept_probs[order],
            num_nodes=self.trees.num_nodes[order],
        )
        limits = {
            name: None if getattr(self, name) is None else getattr(self, name)[order]
            for name in ("max_drafts", "weights", "min_drafts")
        }
        return dataclasses.replace(self, trees=trees, **limits)

    def order_keys(self) -> list[tuple[float, int, int, int]]:
        """(-weighted survival, depth, request, node) of every node, best first."""
        values = selection.survival(self.trees)
        keys = []
        for request, count in enumerate(self.trees.num_nodes.tolist()):
            parents = self.trees.parents[request].tolist()
            for node in range(count):
                value = values[request][node]
                if self.weights is not None:
                    value = np.float32(value * self.weights[request].numpy())
                depth = selection.depth(parents, node)
                keys.append((-float(value), depth, request, node))
        return sorted(keys)

    def room(self) -> list[int]:
        """Nodes that may be kept of each request."""
        counts = self.trees.num_nodes.tolist()
        if self.max_drafts is None:
            return counts
        return list(map(min, counts, self.max_drafts.tolist()))

    def floors(self) -> list[int]:
        if self.min_drafts is None:
            return [0] * self.trees.batch_size
        return list(map(min, self.room(), self.min_drafts.tolist()))


@st.composite
def forests(draw, probs=PROBS, min_bs=0) -> DraftTrees:
    """Any trees; padding holds values that would be refused of a node."""
    bs, width = draw(st.integers(min_bs, MAX_BS)), draw(st.integers(0, MAX_NODES))
    counts = [draw(st.integers(0, width)) for _ in range(bs)]
    parents = [[draw(st.integers(-1, i - 1)) for i in range(n)] for n in counts]
    values = [[draw(probs) for _ in range(n)] for n in counts]
    tokens = [[draw(st.integers(0, 2)) for _ in range(n)] for n in counts]

    def padded(rows, filler, dtype):
        full = [row + [filler] * (width - len(row)) for row in rows]
        return torch.tensor(full, dtype=dtype).view(bs, width)

    return DraftTrees(
        tokens=padded(tokens, -7, torch.int64),
        parents=padded(parents, 99, torch.int64),
        accept_probs=padded(values, float("nan"), torch.float32),
        num_nodes=torch.tensor(counts, dtype=torch.int64),
    )


@st.composite
def batches(draw, trees=None, limited=True, always=()) -> Batch:
    """Trees with or without each of the limits, those of `always` at any rate."""
    trees = draw(forests() if trees is None else trees)
    bs = trees.batch_size

    def maybe(name, values, dtype):
        if name not in always and not draw(st.booleans()):
            return None
        return torch.tensor([draw(values) for _ in range(bs)], dtype=dtype)

    counts = st.integers(0, MAX_NODES + 1)
    return Batch(
        trees=trees,
        # Up to a little more than there is.
        budget=draw(st.integers(0, int(trees.num_nodes.sum()) + 1)),
        max_drafts=maybe("max_drafts", counts, torch.int64) if limited else None,
        weights=maybe("weights", WEIGHTS, torch.float32),
        min_drafts=maybe("min_drafts", counts, torch.int64) if limited else None,
    )


def plan_of(batch: Batch, allocation: Allocation, anchors: torch.Tensor) -> VerifyPlan:
    return build_verify_plan(
        batch.trees, allocation, anchors=anchors, prefix_lens=anchors + 3
    )


def descendants(trees: DraftTrees, request: int, node: int) -> list[int]:
    below = [node]
    for other in range(node + 1, int(trees.num_nodes[request])):
        if int(trees.parents[request, other]) in below:
            below.append(other)
    return below[1:]


@searched
@given(forests())
def test_survival_falls_along_every_path(trees):
    survival = path_survival(trees)
    for request, count in enumerate(trees.num_nodes.tolist()):
        assert (survival[request, count:] == 0).all()
        for node in range(count):
            parent = int(trees.parents[request, node])
            bound = 1.0 if parent < 0 else float(survival[request, parent])
            assert 0 <= float(survival[request, node]) <= bound


@searched
@given(batches())
def test_kept_sets_are_closed_and_exact_in_number(batch):
    allocation = batch.select()
    allocation.validate()
    assert int(allocation.keep.sum()) == min(batch.budget, sum(batch.room()))
    for request, node in allocation.keep.nonzero().tolist():
        assert node < batch.trees.num_nodes[request]
        parent = int(batch.trees.parents[request, node])
        assert parent < 0 or allocation.keep[request, parent]


def assert_beginning_of_the_order(batch: Batch) -> None:
    keep = batch.select().keep
    order = [(request, node) for _, _, request, node in batch.order_keys()]
    kept = [bool(keep[place]) for place in order]
    assert kept == [i < batch.budget for i in range(len(order))]


@searched
@given(batches(limited=False))
def test_kept_nodes_are_the_beginning_of_the_order(batch):
    assert_beginning_of_the_order(batch)


@searched
@given(batches(forests(probs=st.sampled_from([0.5, 1.0]), min_bs=2), limited=False))
def test_ties_go_by_depth_then_request_then_node(batch):
    assert_beginning_of_the_order(dataclasses.replace(batch, weights=None))


@searched
@given(batches())
def test_more_budget_keeps_what_less_kept(batch):
    less, more = batch.select().keep, batch.select(extra=1).keep
    assert not (less & ~more).any()


@searched
@given(batches(forests(min_bs=2), always=("min_drafts",)))
def test_caps_and_floors_hold(batch):
    floors = batch.floors()
    kept = batch.select().keep.sum(1).tolist()
    assert all(have <= room for have, room in zip(kept, batch.room(), strict=True))
    pairs = list(zip(kept, floors, strict=True))
    if batch.budget >= sum(floors):
        assert all(have >= floor for have, floor in pairs)
    else:
        assert all(have <= floor for have, floor in pairs)


@searched
@given(batches(), st.data())
def test_a_permuted_batch_keeps_the_same_values(batch, data):
    order = data.draw(st.permutations(range(batch.trees.batch_size)))
    keep, moved = batch.select().keep, batch.permuted(order)
    moved_keep = moved.select().keep
    assert path_survival(moved.trees).equal(path_survival(batch.trees)[order])

    def values(of: Batch, kept: torch.Tensor) -> list[tuple[float, int]]:
        return [key[:2] for key in of.order_keys() if kept[key[2:]]]

    assert values(moved, moved_keep) == values(batch, keep)


@searched
@given(
    batches(forests(probs=st.floats(2**-6, 1 - 2**-6, width=32), min_bs=2)),
    st.data(),
)
def test_a_permuted_batch_keeps_the_same_nodes_where_values_differ(batch, data):
    keys = [key[:2] for key in batch.order_keys()]
    assume(len(set(keys)) == len(keys))
    order = data.draw(st.permutations(range(batch.trees.batch_size)))
    got, want = batch.permuted(order).select(), batch.select()
    assert got.keep.equal(want.keep[order])
    assert got.verify_lens.equal(want.verify_lens[order])
    assert got.expected_correct_drafts.equal(want.expected_correct_drafts[order])


@searched
@given(batches(), st.data())
def test_a_node_is_decided_without_its_descendants(batch, data):
    """Else whether a draft counts would depend on what was drafted after it."""
    trees = batch.trees
    nodes = [(request, node) for *_, request, node in batch.order_keys()]
    assume(nodes)
    request, node = data.draw(st.sampled_from(nodes))
    probs = trees.accept_probs.clone()
    for below in descendants(trees, request, node):
        probs[request, below] = data.draw(PROBS)
    keep = batch.select().keep
    assert batch.with_probs(probs).select().keep[request, node] == (keep[request, node])


@searched
@given(batches(), st.data())
def test_worse_nodes_that_are_not_kept_change_nothing(batch, data):
    keep = batch.select().keep
    probs = batch.trees.accept_probs.clone()
    for request, count in enumerate(batch.trees.num_nodes.tolist()):
        for node in range(count):
            if not keep[request, node]:
                probs[request, node] *= data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    assert batch.with_probs(probs).select().keep.equal(keep)


def round_of(
    batch: Batch, anchors: torch.Tensor, chosen: torch.Tensor, extra: int = 0
) -> tuple[Allocation, VerifyPlan, AcceptResult]:
    """A round whose target says `chosen[request, node + 1]` at a node."""
    allocation = batch.select(extra)
    plan = plan_of(batch, allocation, anchors)
    plan.validate()
    rows = torch.repeat_interleave(plan.verify_lens.long())
    result = match_tree(plan, chosen[rows, plan.node_ids + 1])
    result.validate()
    return allocation, plan, result


def draw_round(data, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchors and the target's tokens; three tokens, so that many drafts are right."""
    bs, width = batch.trees.tokens.shape
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    anchors = torch.randint(0, 3, (bs,), generator=generator)
    return anchors, torch.randint(0, 3, (bs, width + 1), generator=generator)


@searched
@given(batches(), st.data())
def test_a_round_follows_the_tree(batch, data):
    anchors, chosen = draw_round(data, batch)
    allocation, plan, result = round_of(batch, anchors, chosen)
    rows = torch.repeat_interleave(plan.verify_lens.long())
    want_rows, want_tokens = accept.match(
        batch.trees,
        allocation.keep.tolist(),
        chosen[rows, plan.node_ids + 1].tolist(),
    )
    lens = result.accept_lens.tolist()
    for request, length in enumerate(lens):
        assert result.accept_index[request, :length].tolist() == want_rows[request]
        assert result.accept_tokens[request, :length].tolist() == want_tokens[request]


@searched
@given(batches(), st.data())
def test_more_budget_never_accepts_less(batch, data):
    anchors, chosen = draw_round(data, batch)
    less, more = (
        round_of(batch, anchors, chosen, extra)[2].accept_lens for extra in (0, 1)
    )
    assert (less <= more).all()


@searched
@given(batches(), st.data())
def test_a_request_s_rows_do_not_depend_on_its_place_in_the_batch(batch, data):
    order = data.draw(st.permutations(range(batch.trees.batch_size)))
    anchors, chosen = draw_round(data, batch)
    allocation, plan, result = round_of(batch, anchors, chosen)
    moved = Allocation(
        **{
            field.name: getattr(allocation, field.name)[order]
            for field in dataclasses.fields(allocation)
        }
    )
    other = plan_of(batch.permuted(order), moved, anchors[order])
    lens = plan.verify_lens.tolist()
    for name in ("input_ids", "positions", "node_ids"):
        parts = getattr(plan, name).split(lens)
        assert getattr(other, name).tolist() == [
            value for request in order for value in parts[request].tolist()
        ]
    blocks = plan.tree_mask.split([length * length for length in lens])
    assert other.tree_mask.tolist() == [
        value for request in order for value in blocks[request].tolist()
    ]
    for name in ("next_token", "next_sibling", "parent"):
        table = getattr(plan, f"retrieve_{name}")
        assert getattr(other, f"retrieve_{name}").equal(table[order])
    request_of = torch.tensor(order, dtype=torch.int64)
    rows = request_of.repeat_interleave(other.verify_lens.long())
    again = match_tree(other, chosen[rows, other.node_ids + 1])
    assert again.accept_tokens.equal(result.accept_tokens[order])


@searched
@given(st.integers(0, MAX_BS), st.integers(0, MAX_NODES), st.integers(0, 9))
def test_nothing_but_padding_is_a_plain_decode_step(bs, max_nodes, budget):
    ints = torch.full((bs, max_nodes), 99)
    trees = DraftTrees(
        tokens=ints,
        parents=ints,
        accept_probs=torch.full((bs, max_nodes), float("nan")),
        num_nodes=torch.zeros(bs, dtype=torch.int64),
    )
    batch = Batch(trees=trees, budget=budget, min_drafts=torch.full((bs,), 2))
    anchors = torch.arange(bs)
    allocation, plan, result = round_of(batch, anchors, anchors[:, None] + 5)
    assert path_survival(trees).count_nonzero() == 0
    assert allocation.verify_lens.tolist() == [1] * bs
    assert allocation.expected_correct_drafts.tolist() == [0.0] * bs
    assert plan.input_ids.tolist() == anchors.tolist()
    assert plan.tree_mask.tolist() == [True] * bs
    assert result.accept_tokens.tolist() == [[request + 5] for request in range(bs)]


@once
@pytest.mark.parametrize("name", ["num_nodes", "parents", "accept_probs"])
@searched
@given(forests(min_bs=1), st.data())
def test_trees_out_of_range_are_refused(name, trees, data):
    request = data.draw(st.integers(0, trees.batch_size - 1))
    count = int(trees.num_nodes[request])
    bad = getattr(trees, name).clone()
    if name == "num_nodes":
        outside = [-1, trees.max_nodes + 1, 2**40]
        bad[request] = data.draw(st.sampled_from(outside))
    else:
        assume(count)
        node = data.draw(st.integers(0, count - 1))
        values = st.sampled_from([-2, node, node + 1, 2**40])
        bad[request, node] = data.draw(values if name == "parents" else NOT_A_PROB)
    with pytest.raises(ValueError, match=f"^{name} must "):
        dataclasses.replace(trees, **{name: bad})


@once
@pytest.mark.parametrize("name", ["max_drafts", "min_drafts", "weights"])
@searched
@given(forests(min_bs=1), st.data())
def test_limits_out_of_range_are_refused(name, trees, data):
    request = data.draw(st.integers(0, trees.batch_size - 1))
    if name == "weights":
        value = torch.ones(trees.batch_size)
        value[request] = data.draw(NOT_A_WEIGHT)
    else:
        value = torch.ones(trees.batch_size, dtype=torch.int64)
        value[request] = data.draw(st.sampled_from([-1, -(2**63)]))
    with pytest.raises(ValueError, match=f"^{name} must "):
        select_draft_tokens(trees, draft_budget=3, **{name: value})


@once
@searched
@given(forests(), st.integers(max_value=-1), st.booleans())
def test_a_negative_budget_is_refused(trees, budget, in_a_tensor):
    value = torch.tensor(max(budget, -(2**63))) if in_a_tensor else budget
    with pytest.raises(ValueError, match=r"^draft_budget must be at least 0"):
        select_draft_tokens(trees, draft_budget=value)
