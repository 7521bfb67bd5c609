"""Warm-up drafts whatever the budget is, and leaves no trace in budget or totals."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang_tetris.adapter import warm_up
from sglang_tetris.adapter.reporting import RoundReporter
from sglang_tetris.core.config import BudgetSpec


def test_budget_and_totals_are_the_users_afterwards(monkeypatch) -> None:
    configured = BudgetSpec("fixed", 3)
    target = SimpleNamespace(model_runner=None)
    ran = []
    worker = SimpleNamespace(
        planner=None,
        make_planner=lambda budget: budget,
        reporter=RoundReporter(),
        target_worker=target,
        device="cpu",
    )

    def steps(asked: SimpleNamespace, rows: int) -> bool:
        ran.append(str(asked.planner))
        asked.reporter.num_steps += rows
        return True

    monkeypatch.setattr(warm_up, "_warm_up_samplers", lambda runner, device: None)
    monkeypatch.setattr(warm_up, "_warm_up_steps", steps)
    warm_up.warm_up(worker, configured)
    assert set(ran) == {"0", "2x"}, "plain rounds and rounds with drafts"
    assert worker.planner is configured
    assert worker.reporter.describe() == RoundReporter().describe()
    assert worker.reporter.num_steps == 0
