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
    for name in ("run", "report", "pace"):
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
    # A prompt that came in between, and steps of fewer requests.
    steps += [("EXTEND", 1, 50.0, 51.0), ("DECODE", 3, 60.0, 61.0)]
    steps += run_of(8, forward=0.040, host=0.002, begin=100.0)
    found = host_time.step_times(steps, 4)
    assert found["forward_ms"] == pytest.approx(40)
    assert found["host_ms"] == pytest.approx(2)
    assert found["drafted"] == 0
    assert found["probing"] == 0


def test_what_drafted_steps_take_beyond_others_is_counted_apart(host_time) -> None:
    steps = run_of(201, forward=0.040, host=0.002)
    # The draft takes 10 ms before the verify, 20 ms dearer, and 5 ms after it.
    end = steps[-1][3]
    steps.append(("TARGET_VERIFY", 4, end + 0.012, end + 0.072))
    steps += run_of(99, forward=0.040, host=0.002, begin=end + 0.079)
    found = host_time.step_times(steps, 4)
    assert found["host_ms"] == pytest.approx(2)
    assert found["drafted"] == pytest.approx(1 / 200)
    assert found["probing"] == pytest.approx(35 / 42 / 200)


def test_a_slower_machine_says_nothing_about_an_arm(host_time) -> None:
    plain, undrafted, scrambled = host_time.ARMS
    found = []
    for turn, forward in enumerate((30.0, 60.0)):
        for arm, host in ((plain, 2.0), (undrafted, 3.0), (scrambled, 2.0)):
            slower = 1.0 if arm == plain else 1.3
            times = {"forward_ms": slower * forward, "host_ms": slower * host}
            times |= {"drafted": 0.0, "probing": 0.0}
            found.append({"round": turn, "arm": arm, "concurrency": 1, **times})
    rows = {row["arm"]: row for row in host_time.summarise(found)}
    assert rows[plain]["over_plain"] == 1
    assert rows[scrambled]["over_plain"] == pytest.approx(1)
    low, high = rows[undrafted]["range"]
    assert (low, high) == pytest.approx((63 / 62, 33 / 32))
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
