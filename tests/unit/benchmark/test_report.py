"""The benchmark's figures: ratios of the same round, and the table's own text."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("rich")

SCRIPT = Path(__file__).resolve().parents[3] / "benchmark" / "serving" / "report.py"
spec = importlib.util.spec_from_file_location("serving_report", SCRIPT)
report = importlib.util.module_from_spec(spec)
spec.loader.exec_module(report)


def runs(arm: str, *speeds: float) -> list[dict]:
    return [
        {"arm": arm, "label": arm, "round": at, "concurrency": 4}
        | {"output_throughput": speed}
        for at, speed in enumerate(speeds)
    ]


def test_arms_are_compared_within_a_round() -> None:
    # The machine drifts between the rounds: the ratio of the medians would be 2.
    measured = runs("plain", 9, 9, 9) + runs("eagle-chain", 10, 100, 1000)
    measured += runs("tetris", 30, 200, 5000)
    assert report.compare_subject(measured) == {"eagle-chain": {4: 3.0}}


def test_without_tetris_there_is_nothing_to_compare() -> None:
    assert report.compare_subject(runs("plain", 9) + runs("eagle-chain", 10)) == {}


def test_paces_leave_prompts_out_and_compare_within_a_round() -> None:
    measured = runs("plain", 9, 9, 9) + runs("tetris-undrafted", 9, 9, 9)
    for run, tpot in zip(measured, (10, 20, 40, 10, 25, 50), strict=True):
        run |= {"median_tpot_ms": tpot, "median_ttft_ms": 1}
    summary = report.summarise(measured)
    assert summary[1]["pace_ratio"] == {"median": 0.8, "min": 0.8, "max": 1.0}
    (line,) = report._paces(summary)
    assert "0.800 [0.800, 1.000] @4" in line
