"""The exactness script writes what it found and fails where an answer is wrong."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmark" / "exactness" / "run.py"


@pytest.fixture
def script() -> ModuleType:
    pytest.importorskip("sglang")
    spec = importlib.util.spec_from_file_location("exactness_run", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("wrong", "status"), [(0, 0), (1, 1)])
def test_the_result_is_written(
    script: ModuleType, monkeypatch, tmp_path: Path, wrong: int, status: int
) -> None:
    meta = {"spec_verify_ct": 4, "spec_num_correct_drafts": 2}
    row = script._row("eagle", "tree", "3x", [{"meta_info": meta}] * 2)
    row["wrong"] = wrong
    monkeypatch.setattr(script, "run_matrix", lambda args, console: [row])
    guarded = []
    monkeypatch.setattr(script, "exit_on_signals", lambda: guarded.append(True))
    path = tmp_path / "result.json"
    assert script.main(["--prompts", "2", "--output", str(path)]) == status
    assert guarded, "a signal would leave a server behind"
    written = json.loads(path.read_text())
    assert written["rows"] == [row]
    assert written["rows"][0]["accept_length"] == 1.5
    assert written["settings"] == {"prompts": 2, "tokens": 32, "dtype": "float32"}
    assert {"commit", "versions", "machine", "finished"} <= set(written["provenance"])


def test_the_first_difference(script: ModuleType) -> None:
    assert script.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert script.first_difference([1, 9, 3], [1, 2, 3]) == 1
    assert script.first_difference([1, 2], [1, 2, 3]) == 2
