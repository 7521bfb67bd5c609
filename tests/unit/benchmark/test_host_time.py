"""Steps are compared by what they take beside the target's forward."""

import importlib.util
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytest.importorskip("rich")

FOLDER = Path(__file__).resolve().parents[3] / "benchmark/serving"


@pytest.fixture
def host_time(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    # Others of these names may be loaded: scripts, not modules of a package.
    for name in ("run", "report", "provenance", "pace"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    path = FOLDER / "host_time.py"
    spec = importlib.util.spec_from_file_location("serving_host_time", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_of(
    count: int, *, forward: float, host: float, mode: str = "DECODE", begin: float = 0.0
) -> list[tuple]:
    period = forward + host
    begins = [begin + period * step for step in range(count)]
    return [(mode, 4, start, start + forward) for start in begins]


def test_only_decode_steps_of_the_size_that_follow_each_other_count(host_time) -> None:
    steps = run_of(200, forward=0.040, host=0.002)
    # A prompt that came in between, steps of fewer requests, and a probe.
    steps += [("EXTEND", 1, 50.0, 51.0), ("DECODE", 3, 60.0, 61.0)]
    steps += [("TARGET_VERIFY", 4, 70.0, 75.0)] * 2
    steps += run_of(8, forward=0.040, host=0.002, begin=100.0)
    found = host_time.step_times(steps, 4)
    assert found["forward_ms"] == pytest.approx(40)
    assert found["host_ms"] == pytest.approx(2)
    assert found["period_ms"] == pytest.approx(42)
    assert found["drafted"] == pytest.approx(2 / 110)


def test_a_slower_forward_says_nothing_about_an_arm(host_time) -> None:
    plain, undrafted, scrambled = host_time.ARMS
    found = []
    for turn, forward in enumerate((30.0, 60.0)):
        for arm, host in ((plain, 2.0), (undrafted, 3.0), (scrambled, 2.0)):
            slower = forward if arm == plain else 1.3 * forward
            times = {"forward_ms": slower, "host_ms": host, "drafted": 0.0}
            times["period_ms"] = slower + host
            found.append({"round": turn, "arm": arm, "concurrency": 1, **times})
    rows = {row["arm"]: row for row in host_time.summarise(found)}
    assert rows[plain]["over_plain"] == 1
    assert rows[scrambled]["over_plain"] == 1
    low, high = rows[undrafted]["range"]
    assert (low, high) == pytest.approx((1 + 1 / 62, 1 + 1 / 32))
    assert rows[undrafted]["over_plain"] == pytest.approx((low + high) / 2)


def test_a_server_finds_the_plugin_while_it_is_wanted(
    host_time, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    with host_time.plugged_in(tmp_path):
        path = os.environ["PYTHONPATH"].split(os.pathsep)
        assert path == [str(tmp_path), "/elsewhere"]
        monkeypatch.syspath_prepend(path[0])
        (found,) = entry_points(group="sglang.srt.plugins", name="host_time")
        assert callable(found.load())
    assert os.environ["PYTHONPATH"] == "/elsewhere"
