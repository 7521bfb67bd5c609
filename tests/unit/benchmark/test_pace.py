"""Paces are compared within a turn, and with no speculation alone."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")

FOLDER = Path(__file__).resolve().parents[3] / "benchmark/serving"


@pytest.fixture
def pace(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    # Others of these names may be loaded: scripts, not modules of a package.
    for name in ("run", "report", "provenance"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location("serving_pace", FOLDER / "pace.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_machines_drift_does_not_favour_an_arm(pace) -> None:
    times = [10, 20, 40, 80, 160]
    records = [
        {"concurrency": 4, "turn": turn, "plain": time, "tetris": 1.1 * time}
        for turn, time in enumerate(times)
    ]
    plain, tetris = pace.summarise(records)
    assert plain["over_plain"] == 1
    assert tetris["over_plain"] == pytest.approx(1.1)
    assert tetris["interval"] == pytest.approx([1.1, 1.1])
    assert tetris["ms_per_token"] == pytest.approx(44)


def test_arms_without_no_speculation_are_refused(pace, capsys) -> None:
    with pytest.raises(SystemExit):
        pace.main(["--arms", "tetris"])
    assert "--arms needs plain" in capsys.readouterr().err
