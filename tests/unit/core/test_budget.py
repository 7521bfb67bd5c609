"""Budgets: fixed, a mean per request, and the best ratio over every size."""

import numpy as np
import pytest
import torch

from sglang_tetris.core import (
    CostTable,
    FixedBudget,
    MeanBudget,
    ThroughputBudget,
    path_survival,
)
from tests.reference.forests import forest, trees_of


class StubTable:
    """A cost that is any function of the number of tokens."""

    def __init__(self, time_of):
        self.time_of = time_of
        self.calls = []

    def step_time_s(self, *, total_verify_tokens, batch_size, total_kv_tokens):
        self.calls.append((total_verify_tokens, batch_size, total_kv_tokens))
        return self.time_of(total_verify_tokens)


def budget_of(policy, trees, total_kv_tokens=0):
    got = policy.draft_budget(
        survival=path_survival(trees),
        num_nodes=trees.num_nodes,
        total_kv_tokens=total_kv_tokens,
    )
    assert type(got) is int
    return got


def test_fixed_and_mean_are_not_capped_by_what_there_is():
    trees = trees_of([(1, -1, 0.5)], [], [])
    assert budget_of(FixedBudget(100), trees) == 100
    assert budget_of(MeanBudget(3), trees) == 9
    assert budget_of(MeanBudget(3), trees_of(max_nodes=0)) == 0
    assert repr(FixedBudget(2)) == "FixedBudget(2)"
    assert repr(MeanBudget(3)) == "MeanBudget(3)"


@pytest.mark.parametrize("value", [-1, 1.5, "3", None, True])
def test_bad_sizes(value):
    with pytest.raises(ValueError, match=r"^draft_budget must "):
        FixedBudget(value)
    with pytest.raises(ValueError, match=r"^drafts_per_request must "):
        MeanBudget(value)


@pytest.mark.parametrize("seed", range(25))
def test_throughput_equals_trying_every_size(seed):
    rng = np.random.default_rng(seed)
    trees = forest(rng, int(rng.integers(1, 6)), int(rng.integers(0, 12)))
    steps = rng.random(100).cumsum() + 0.1
    table = StubTable(lambda tokens: float(steps[tokens]))
    counts = trees.num_nodes.tolist()
    rows = path_survival(trees).tolist()
    values = [v for row, n in zip(rows, counts, strict=True) for v in row[:n]]
    values.sort(reverse=True)
    bs = trees.batch_size
    ratios = [(bs + sum(values[:b])) / steps[bs + b] for b in range(len(values) + 1)]
    got = budget_of(ThroughputBudget(table), trees, total_kv_tokens=77)
    assert got == ratios.index(max(ratios))
    assert table.calls == [(bs + b, bs, 77) for b in range(len(values) + 1)]


def test_throughput_looks_past_a_first_downturn():
    # Verifying 2 to 4 tokens costs as much as 4: one draft loses, three win.
    trees = trees_of([(1, -1, 0.9), (2, 0, 0.9), (3, 1, 0.9)])
    table = CostTable(token_knots=(1, 4), knot_times_s=(1.0, 2.2), bucket_edges=(1, 4))
    assert (1 + 0.9) / 2.2 < 1 / 1.0 < (1 + 0.9 + 0.81 + 0.729) / 2.2
    assert budget_of(ThroughputBudget(table), trees) == 3


def test_throughput_takes_the_smaller_of_equals():
    trees = trees_of([(1, -1, 0.0), (2, -1, 0.0)])
    assert budget_of(ThroughputBudget(StubTable(lambda tokens: 1.0)), trees) == 0


def test_a_table_and_its_scalar_calls_agree():
    table = CostTable(
        token_knots=(2, 20), knot_times_s=(1.0, 2.0), bucket_edges=(8, 16, 32)
    )
    trees = forest(np.random.default_rng(5), 4, 9)
    scalar = StubTable(
        lambda tokens: table.step_time_s(
            total_verify_tokens=tokens, batch_size=4, total_kv_tokens=0
        )
    )
    got = budget_of(ThroughputBudget(table), trees)
    assert got == budget_of(ThroughputBudget(scalar), trees)


def test_free_tokens_are_all_taken_and_dear_ones_are_not():
    trees = trees_of([(1, -1, 0.5), (2, 0, 0.5)], [(3, -1, 0.1)])
    flat = CostTable(token_knots=(1,), knot_times_s=(1.0,))
    dear = CostTable(token_knots=(1, 2), knot_times_s=(1.0, 9.0))
    assert budget_of(ThroughputBudget(flat), trees) == 3
    assert budget_of(ThroughputBudget(dear), trees) == 0


def test_no_requests():
    policy = ThroughputBudget(StubTable(lambda tokens: 1.0))
    survival = torch.zeros(0, 4)
    none = torch.zeros(0, dtype=torch.int64)
    assert (
        policy.draft_budget(survival=survival, num_nodes=none, total_kv_tokens=0) == 0
    )


def test_a_table_without_positive_times():
    trees = trees_of([(1, -1, 0.5)])
    with pytest.raises(ValueError, match=r"^cost_table must .* 0\.0 s"):
        budget_of(ThroughputBudget(StubTable(lambda tokens: 0.0)), trees)
