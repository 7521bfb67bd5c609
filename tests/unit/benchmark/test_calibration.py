"""The calibration script writes what it found, and where that comes from."""

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("rich")

from tests.unit.simulator.synthetic import write_synthetic_replay

SCRIPT = Path(__file__).resolve().parents[3] / "benchmark/simulator/calibration.py"
spec = importlib.util.spec_from_file_location("calibration_script", SCRIPT)
calibration = importlib.util.module_from_spec(spec)
spec.loader.exec_module(calibration)


def test_the_result_is_written_with_its_provenance(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibration, "RESAMPLES", 20)
    trace = tmp_path / "tiny.replay.jsonl"
    write_synthetic_replay(trace, num_requests=8, tokens=(20, 30))
    output = tmp_path / "results" / "calibration.json"
    assert calibration.main([str(trace), "--output", str(output)]) == 0
    written = json.loads(output.read_text())
    origin = written.pop("provenance")
    assert {"command", "commit", "versions", "machine", "finished"} <= set(origin)
    assert set(origin["sha256"]) == {trace.name}
    assert origin["recorded"]["synthetic"] is True
    assert set(written) == {"online", "new prompts"}
    assert all(found["nodes"] > 0 for found in written.values())
    assert "Calibration on tiny.replay.jsonl" in capsys.readouterr().out
