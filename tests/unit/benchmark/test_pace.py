"""Paces are compared within a turn, and with no speculation alone."""

import contextlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")

FOLDER = Path(__file__).resolve().parents[3] / "benchmark/serving"


@pytest.fixture
def pace(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    # Others of these names may be loaded: scripts, not modules of a package.
    for name in ("run", "report"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location("serving_pace", FOLDER / "pace.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_machines_drift_does_not_favour_an_arm(pace) -> None:
    records = [
        {"start": 0, "concurrency": 4, "turn": i, "plain": time, "tetris": 1.1 * time}
        for i, time in enumerate([10, 20, 40, 80, 160])
    ]
    plain, tetris = pace.summarise(records)
    assert plain["over_plain"] == 1
    assert tetris["over_plain"] == pytest.approx(1.1)
    assert tetris["interval"] == pytest.approx([1.1, 1.1])
    assert tetris["ms_per_token"] == pytest.approx(44)


def test_the_server_that_was_started_first_is_not_favoured(pace) -> None:
    """Alike arms, the first of a start a tenth faster, and one turn of all is odd."""
    records = []
    for start in range(2):
        for turn in range(5):
            times = {"plain": 100.0, "tetris": 100.0}
            times[("plain", "tetris")[start]] = 90.0
            if start == turn == 1:
                times["plain"] = 300.0
            records.append({"start": start, "concurrency": 1, "turn": turn, **times})
    _, tetris = pace.summarise(records)
    assert tetris["over_plain"] == pytest.approx(1)
    low, high = tetris["interval"]
    assert low < 1.001
    assert high > 0.999


def test_every_arm_is_started_first_once(pace, monkeypatch, tmp_path) -> None:
    orders = []

    @contextlib.contextmanager
    def started(arms, models):
        orders.append(tuple(arms))
        yield dict.fromkeys(arms), []

    def measure(servers, prompts, concurrencies, turns):
        assert turns == 6
        return [{"concurrency": 1, "turn": 0, **dict.fromkeys(servers, 10.0)}]

    monkeypatch.setattr(pace, "started", started)
    monkeypatch.setattr(pace, "measure", measure)
    monkeypatch.setattr(pace, "prepare", lambda: None)
    monkeypatch.setattr(pace, "RESULTS", tmp_path)
    arms = ["plain", "tetris", "eagle-chain"]
    assert pace.main(["--arms", *arms, "--name", "here"]) == 0
    assert [order[0] for order in orders] == arms
    assert all(sorted(order) == sorted(arms) for order in orders)
    record = json.loads((tmp_path / "here.json").read_text())
    assert [turn["start"] for turn in record["ms_per_token"]] == [0, 1, 2]
    assert [row["over_plain"] for row in record["summary"]] == [1, 1, 1]


def test_arms_without_no_speculation_are_refused(pace, capsys) -> None:
    with pytest.raises(SystemExit):
        pace.main(["--arms", "tetris"])
    assert "--arms needs plain" in capsys.readouterr().err
