"""Warm-up drafts whatever the budget is, and leaves no trace in budget or totals."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang_tetris.adapter import warm_up
from sglang_tetris.adapter.budgets import BudgetHolder
from sglang_tetris.adapter.reporting import RoundReporter
from sglang_tetris.core.config import BudgetSpec


def test_budget_and_totals_are_the_users_afterwards(monkeypatch) -> None:
    configured = BudgetHolder(BudgetSpec("fixed", 0))
    target = SimpleNamespace(model_runner=None)
    worker = SimpleNamespace(
        budget=configured, reporter=RoundReporter(), target_worker=target, device="cpu"
    )

    def steps(asked: SimpleNamespace, rows: int) -> bool:
        assert not asked.budget.is_zero()
        asked.reporter.num_steps += rows
        return True

    monkeypatch.setattr(warm_up, "_warm_up_samplers", lambda runner, device: None)
    monkeypatch.setattr(warm_up, "_warm_up_steps", steps)
    warm_up.warm_up(worker)
    assert worker.budget is configured
    assert worker.reporter.describe() == RoundReporter().describe()
    assert worker.reporter.num_steps == 0
