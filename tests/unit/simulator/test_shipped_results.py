"""What is claimed of the simulation that is shipped, read from its own file."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")

from sglang_tetris.simulator.comparison import against_baselines
from sglang_tetris.simulator.policies.catalog import BASELINES
from sglang_tetris.tools.simulate import CONCURRENCIES
from sglang_tetris.tools.simulate_report import budget_lines, speed_lines, summary_lines

FOLDER = Path(__file__).resolve().parents[3] / "benchmark/simulator"
RESULT = FOLDER / "results/policies.json"
SHIPPED = json.loads(RESULT.read_text(encoding="utf-8"))
TABLES = SHIPPED["tables"]
SERVED = "auto-trees"

each_table = pytest.mark.parametrize("name", TABLES)


def ratios(name: str) -> dict[int, float]:
    """Return, by load, the served policy's speed relative to the best baseline."""
    return {
        entry["load"]: entry["ratio"]
        for entry in against_baselines(TABLES[name], SERVED)
    }


def test_every_shipped_cost_table_was_simulated() -> None:
    shipped = {path.stem for path in (FOLDER / "cost_tables").glob("*.json")}
    assert set(TABLES) == shipped


@each_table
def test_nobody_is_missing_at_any_load(name: str) -> None:
    """A baseline that did not run would not be beaten, only absent."""
    named = {"none", "dsd", *(f"fixed-{k}" for k in range(1, 9))}
    paper = {policy for policy in BASELINES if policy.startswith("paper-")}
    assert paper
    assert named | paper == set(BASELINES)
    for load in CONCURRENCIES:
        policies = {row["policy"] for row in TABLES[name] if row["load"] == load}
        assert policies >= {*BASELINES, SERVED}
    assert not any(row["is_open"] for row in TABLES[name])


@each_table
def test_the_served_policy_is_nowhere_far_below_the_best_baseline(name: str) -> None:
    found = ratios(name)
    assert tuple(found) == CONCURRENCIES
    assert {load: ratio for load, ratio in found.items() if ratio < 0.99} == {}


@each_table
def test_the_served_policy_is_above_the_best_baseline_at_some_loads(name: str) -> None:
    assert sum(ratio > 1 for ratio in ratios(name).values()) >= 2


def test_trees_find_a_tenth_more_than_the_papers_rule_at_two_drafts_each() -> None:
    correct = {
        row["policy"]: row["correct_per_request_round"]
        for row in SHIPPED["budgets"]
        if row["budget"] == 2
    }
    paper = max(correct["paper-2+1"], correct["paper-2+2"])
    assert correct["ours-2x-trees"] >= 1.10 * paper


def test_the_tables_that_people_read_say_the_same() -> None:
    text = RESULT.with_suffix(".md").read_text(encoding="utf-8")
    sections: list[tuple[Any, Any]] = [budget_lines(SHIPPED["budgets"])]
    sections += [speed_lines(rows) for rows in TABLES.values()]
    for header, lines in sections:
        for line in (header, *lines):
            assert f"| {' | '.join(line)} |" in text
    for line in summary_lines(TABLES):
        assert f"- {line}\n" in text
