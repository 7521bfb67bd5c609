"""The allocator's benchmark runs, and its C loop still does what the core's does."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "benchmark" / "allocator" / "bench_select.py"
spec = importlib.util.spec_from_file_location(
    "allocator_judge", SCRIPT.with_name("judge.py")
)
judge = importlib.util.module_from_spec(spec)
spec.loader.exec_module(judge)
SIZES = [(16, 63), (64, 63), (128, 63), (512, 63), (64, 15), (64, 127), (64, 255)]


def made_up(size: tuple[int, int], median_ms: float, kept: int = 8, limits=False):
    return {
        "batch_size": size[0],
        "max_nodes": size[1],
        "drafts_per_request": kept,
        "limits": limits,
        "both_wall_ms": {"median": median_ms, "p90": 9.0},
    }


def test_a_short_run_writes_every_row(tmp_path):
    output = tmp_path / "results" / "allocator.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--repeats", "2", "--output", str(output)],
        capture_output=True,
        text=True,
        check=False,
    )
    # It compares the two loops' results itself and stops where they differ.
    assert done.returncode == 0, done.stderr
    record = json.loads(output.read_text())
    rows = record["results"]
    for size in ((64, 63), (512, 63)):
        implementations = {
            row["implementation"]
            for row in rows
            if (row["batch_size"], row["max_nodes"]) == size
        }
        assert implementations == {"numba", "torch"}
    assert all(row["both_wall_ms"]["median"] > 0 for row in rows)
    assert [row["batch_size"] for row in record["selection_loop"]] == [64, 512]
    assert record["settings"]["threads"] == 1
    assert {"commit", "versions", "machine", "finished"} <= set(record["provenance"])
    # Whether they are met is the machine's affair, and no failure.
    for line in judge.verdict_lines(record["verdicts"], record["growth"]):
        assert line in done.stdout
    limits = {(row["batch_size"], row["limit_ms"]) for row in record["verdicts"]}
    assert limits == {(64, 0.3), (512, 2.0)}


def test_a_limit_is_met_below_it_only() -> None:
    rows = [made_up((64, 63), ms) for ms in (0.299, 0.3, 0.301)]
    rows += [made_up((512, 63), ms) for ms in (1.999, 2.0)]
    # Sizes without a limit are not judged.
    rows += [made_up((1024, 63), 99.0), made_up((64, 255), 99.0)]
    found = judge.judge_times(rows)
    assert [row["met"] for row in found] == [True, False, False, True, False]


def test_a_verdict_says_what_it_is_of() -> None:
    rows = [made_up((64, 63), 0.2), made_up((64, 63), 0.41, kept=3, limits=True)]
    assert judge.verdict_lines(judge.judge_times(rows), []) == [
        "64 x 63 under 0.3 ms, 8 kept per request: met (0.200 ms)",
        "64 x 63 under 0.3 ms, 3 kept per request, with limits per request: not met "
        "(0.410 ms)",
    ]


@pytest.mark.parametrize(
    ("power", "met"), [(0.0, True), (1.0, True), (1.1, True), (1.3, False), (2, False)]
)
def test_growth_is_the_exponent_of_the_number_of_nodes(power: float, met: bool) -> None:
    rows = [made_up(size, (size[0] * size[1]) ** power / 1e4) for size in SIZES]
    requests, nodes = judge.judge_growth(rows)
    for verdict, num_steps in ((requests, 3), (nodes, 3)):
        assert verdict["exponent"] == pytest.approx(power, abs=1e-3)
        assert verdict["met"] is met
        assert len(verdict["steps"]) == num_steps
        for step in verdict["steps"]:
            assert step["exponent"] == pytest.approx(power, abs=1e-3)
    said = f"{'met' if met else 'not met'} ({power:.2f}; {power:.2f} to 64 x 63, "
    assert said in judge.verdict_lines([], [requests, nodes])[0]


def test_growth_with_requests_and_with_nodes_are_told_apart() -> None:
    rows = [made_up(size, size[0] * size[1] ** 2 / 1e4) for size in SIZES]
    assert [verdict["met"] for verdict in judge.judge_growth(rows)] == [True, False]


def test_one_disturbed_time_does_not_decide() -> None:
    # One that took half as long again, after one that was not disturbed.
    rows = [made_up(size, size[0] * size[1] / 1e4) for size in SIZES]
    rows[2]["both_wall_ms"]["median"] *= 1.5
    requests, _ = judge.judge_growth(rows)
    assert max(step["exponent"] for step in requests["steps"]) > judge.MAX_EXPONENT
    assert requests["met"]
