"""LaggedBudget: this step's budget from the step before, whatever this step shows."""

import pytest
import torch

from sglang_tetris.core import FixedBudget, LaggedBudget, MeanBudget


class Recorder:
    """A policy that keeps what it is asked and answers with the number of requests."""

    def __init__(self):
        self.asked = []

    def draft_budget(self, *, survival, num_nodes, total_kv_tokens):
        self.asked.append((survival.tolist(), num_nodes.tolist(), total_kv_tokens))
        return 10 + num_nodes.shape[0]

    def __repr__(self):
        return "Recorder()"


def step(policy, rows, kv=0):
    """One call for requests of two nodes, `rows` being their survivals."""
    return policy.draft_budget(
        survival=torch.tensor(rows, dtype=torch.float32).view(-1, 2),
        num_nodes=torch.tensor([2] * len(rows), dtype=torch.int64),
        total_kv_tokens=kv,
    )


A, B, C, D = [0.75, 0.5], [0.5, 0.25], [0.25, 0.125], [1.0, 1.0]


def test_the_policy_sees_the_step_before():
    recorder = Recorder()
    policy = LaggedBudget(recorder)
    assert step(policy, [A, B], kv=5) == 2
    assert recorder.asked == []
    assert step(policy, [C, D], kv=6) == 12
    assert step(policy, [D, D], kv=7) == 12
    # Survivals of the call before, KV tokens of this one.
    assert recorder.asked == [([A, B], [2, 2], 6), ([C, D], [2, 2], 7)]


def test_this_steps_survival_makes_no_difference():
    budgets = set()
    for now in ([A, A], [D, D], [[float("nan")] * 2] * 2):
        recorder = Recorder()
        policy = LaggedBudget(recorder)
        step(policy, [B, C])
        step(policy, now)
        budgets.add(str(recorder.asked))
    assert len(budgets) == 1


def test_another_number_of_requests():
    recorder = Recorder()
    policy = LaggedBudget(recorder)
    step(policy, [A, B])
    assert step(policy, [D] * 4) == 14
    assert recorder.asked[-1][:2] == ([A, A, B, B], [2] * 4)
    step(policy, [A, B, C, D])
    assert step(policy, [D] * 2) == 12
    assert recorder.asked[-1][0] == [A, C]
    assert step(policy, [D] * 3) == 13
    assert recorder.asked[-1][0] == [D, D, D]


def test_the_number_of_nodes_belongs_to_its_row():
    recorder = Recorder()
    policy = LaggedBudget(recorder)
    for counts in ([0, 1, 2], [2]):
        policy.draft_budget(
            survival=torch.zeros(len(counts), 2),
            num_nodes=torch.tensor(counts),
            total_kv_tokens=0,
        )
    step(policy, [A, B])
    assert [asked[1] for asked in recorder.asked] == [[0], [2, 2]]


def test_a_step_without_requests_is_forgotten():
    recorder = Recorder()
    policy = LaggedBudget(recorder, first_drafts_per_request=3)
    assert step(policy, []) == 0
    assert step(policy, [A, B]) == 6
    assert step(policy, []) == 10
    assert step(policy, [C]) == 11
    assert [asked[0] for asked in recorder.asked] == [[], [A]]


def test_the_callers_tensors_may_change():
    recorder = Recorder()
    policy = LaggedBudget(recorder)
    survival, num_nodes = torch.tensor([A]), torch.tensor([2])
    for _ in range(2):
        policy.draft_budget(survival=survival, num_nodes=num_nodes, total_kv_tokens=0)
        survival.fill_(0)
        num_nodes.fill_(0)
    assert recorder.asked == [([A], [2], 0)]


def test_constant_policies_are_unchanged_after_the_first_step():
    for policy, want in ((FixedBudget(7), 7), (MeanBudget(2), 6)):
        lagged = LaggedBudget(policy)
        assert [step(lagged, [A, B, C]) for _ in range(3)] == [3, want, want]


def test_repr_and_bad_first_budget():
    policy = LaggedBudget(Recorder(), first_drafts_per_request=2)
    assert repr(policy) == "LaggedBudget(Recorder(), first_drafts_per_request=2)"
    for value in (-1, 1.5, None):
        with pytest.raises(ValueError, match=r"^first_drafts_per_request must "):
            LaggedBudget(FixedBudget(1), first_drafts_per_request=value)
