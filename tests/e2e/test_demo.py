"""`examples/demo.py` as a user runs it: to its end, into a failure, and interrupted."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sglang_tetris.tools.prepare_model import prepare

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"
RUN_TIMEOUT_S = 1200
START_TIMEOUT_S = 120


@pytest.fixture(scope="module", autouse=True)
def _prepared():
    prepare()  # so that no test waits for a download


def start_demo(tmp_path: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(DEMO), *arguments],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def servers_logging_to(tmp_path: Path) -> list[psutil.Process]:
    """Return every live process that inherited the demo's TMPDIR."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(tmp_path):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_runs_to_its_end(tmp_path):
    demo = start_demo(tmp_path, "--requests", "4", "--max-new-tokens", "24")
    printed, errors = demo.communicate(timeout=RUN_TIMEOUT_S)
    assert demo.returncode == 0, errors[-3000:]
    assert re.search(r"The first answer began \d+ s after start\.", printed)
    for kind in ("chat", "code", "maths", "text"):
        assert re.search(rf"│ {kind} ", printed)
    numbers = r" │ +".join([r"(\d+)", r"(\d+)", r"([\d.]+)", r"(\d+)", r"(\d+)"])
    total = re.search(rf"│ all +│ +│ +{numbers} ", printed)
    tokens, rounds, length, verified, correct = map(float, total.groups())
    assert tokens <= 4 * 24
    assert rounds > 0
    assert length >= 1
    assert correct <= verified
    for arm in ("budget 8", "budget auto"):
        assert re.search(rf"│ TETRIS, {arm} +│ +\d+ │", printed)
    assert re.search(r"equal those without speculation: \d of 8 ", printed)
    assert re.search(r"Fastest in this run: \S", printed)
    assert servers_logging_to(tmp_path) == []


def test_a_failure_is_one_message_and_leaves_nothing(tmp_path):
    demo = start_demo(tmp_path, "--tetris-budget", "nonsense")
    _printed, errors = demo.communicate(timeout=RUN_TIMEOUT_S)
    assert demo.returncode == 1
    assert "demo: The server ended with status" in errors
    assert "nonsense" in errors
    assert "Traceback" not in errors.partition("End of")[0]
    assert servers_logging_to(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(tmp_path, number):
    demo = start_demo(tmp_path)
    deadline = time.monotonic() + START_TIMEOUT_S
    # The server's process, and one that it has started in turn.
    while len(servers_logging_to(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len(servers_logging_to(tmp_path)) >= 2
    demo.send_signal(number)
    demo.communicate(timeout=60)
    assert demo.returncode == 128 + number
    assert servers_logging_to(tmp_path) == []
