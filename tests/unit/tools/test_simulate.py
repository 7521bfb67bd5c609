"""The simulator's command line, on a small made-up recording."""

import json
from pathlib import Path

import pytest

pytest.importorskip("rich")

from sglang_tetris.tools import simulate, simulate_report
from tests.unit.simulator.synthetic import write_synthetic_replay

TABLES = Path(__file__).resolve().parents[3] / "benchmark/simulator/cost_tables"
L4 = TABLES / "l4-llama-3b.json"


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "tiny.replay.jsonl"
    write_synthetic_replay(path, num_requests=8, tokens=(20, 30))
    return path


def command(trace: Path, *more: str) -> list[str]:
    return [str(trace), "--cost-table", str(L4), "--rounds", "30", *more]


def test_it_prints_tables_and_writes_json_markdown_and_a_plot(trace, tmp_path, capsys):
    output = tmp_path / "results" / "small.json"
    policies = ("none", "fixed-2", "auto-trees", "oracle-trees")
    arguments = command(trace, "--concurrency", "1", "8", "--policies", *policies)
    assert simulate.main([*arguments, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "Correct drafts at equal budgets" in printed
    assert "l4-llama-3b, auto-trees: at least" in printed
    result = json.loads(output.read_text())
    rows = result["tables"]["l4-llama-3b"]
    assert [(row["load"], row["policy"]) for row in rows] == [
        (load, policy) for load in (1, 8) for policy in policies
    ]
    assert {row["budget"] for row in result["budgets"]} == {1, 2}
    provenance = result["provenance"]
    assert provenance["command"].startswith("python -m sglang_tetris.tools.simulate")
    assert {"commit", "machine", "versions", "finished"} <= set(provenance)
    assert provenance["recorded"]["synthetic"] is True
    assert set(provenance["sha256"]) == {trace.name, L4.name}
    markdown = output.with_suffix(".md").read_text()
    assert "| load | best baseline |" in markdown
    assert output.with_suffix(".png").stat().st_size > 1000


def test_the_same_command_gives_the_same_numbers_on_any_number_of_processes(trace):
    options = simulate.parse(
        command(trace, "--concurrency", "2", "--policies", "dsd", "auto-chains")
    )
    recording = simulate.Recording.from_replay(simulate.read_replay(trace))
    table = simulate.CostTable.from_json(L4.read_text())
    found = []
    for jobs in (1, 2):
        options.jobs = jobs
        found.append(simulate.speed_rows(options, recording, "l4", table))
    assert found[0] == found[1]


def test_arrivals_can_come_by_themselves_to_several_servers(trace, capsys):
    arguments = command(trace, "--rate", "3", "--capacity", "4", "--replicas", "2")
    more = ("--router", "least-loaded", "--budgets", "--policies", "none", "fixed-1")
    assert simulate.main([*arguments, *more]) == 0
    assert "Correct drafts" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("--policies", "fastest"), "no policy is called 'fastest'"),
        (("--cost-table", __file__), "not valid JSON"),
        (("--cost-table", "/nowhere.json"), "No such file"),
    ],
)
def test_mistakes_are_one_sentence(trace, capsys, change, said):
    assert simulate.main([*command(trace), *change]) == 1
    error = capsys.readouterr().err
    assert error.startswith("simulate: ")
    assert said in error
    assert error.count("\n") == 1


def test_a_table_shows_the_ratio_and_that_from_the_start():
    rows = [
        {
            "policy": name,
            "load": 8,
            "is_open": False,
            "tokens_per_s": speed,
            "tokens_per_s_from_start": start,
        }
        for name, speed, start in (
            ("none", 10, 10),
            ("auto-trees+reading", 11, 10),
            ("auto-trees", 12, 9),
        )
    ]
    header, lines = simulate_report.speed_lines(rows)
    names = ["auto-trees", "auto-trees+reading", "none"]
    assert header == ["load", "best baseline", "tokens/s", *names]
    ratios = ["1.200 (0.900)", "1.100 (1.000)", "1.000"]
    assert lines == [["8", "none", "10.0", *ratios]]
    assert simulate_report.summary_lines({"x": rows}) == [
        f"x, {name}: at least {ratio} of the best baseline, at load 8; above it at 1 "
        "of 1 loads"
        for name, ratio in (("auto-trees", "1.200"), ("auto-trees+reading", "1.100"))
    ]
