"""A server that cannot be what it was asked to be ends at once, with one sentence.

SGLang is imported once; each case then runs the launcher's own steps in a forked child,
so that a dozen refusals do not cost a dozen imports. One case runs the real command.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import models

SHAPE = (
    *("--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1"),
    "--speculative-num-draft-tokens",
)

LAUNCH = """
import json, os, sys
from sglang.launch_server import load_plugins, prepare_server_args, run_server
load_plugins()
for case in map(json.loads, sys.stdin):
    child = os.fork()
    if child == 0:
        out = os.open(case["log"], os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        run_server(prepare_server_args(case["argv"]))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory):
    """A function: command line -> (exit status, the error's line)."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", LAUNCH],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    logs = tmp_path_factory.mktemp("launches")
    number = iter(range(1000))

    def run(argv: list[str]) -> tuple[int, str]:
        log = logs / str(next(number))
        process.stdin.write(json.dumps({"argv": argv, "log": str(log)}) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.strip().lstrip("-").isdigit():
                break
        text = log.read_text()
        assert "Traceback" not in text
        return int(line), [row for row in text.splitlines() if "error:" in row][-1]

    yield run
    process.stdin.close()
    process.wait(timeout=120)


@pytest.fixture
def argv(model_root: Path) -> Callable[..., list[str]]:
    def build(draft: Path | str, *more: str) -> list[str]:
        return [
            *("--model-path", str(models.make_target(model_root))),
            *("--speculative-algorithm", "TETRIS", "--dtype", "float32"),
            *(["--speculative-draft-model-path", str(draft)] if draft else []),
            *more,
        ]

    return build


def test_bad_flags(launch, argv, model_root: Path) -> None:
    draft = models.make_eagle_draft(model_root)
    for more, names in (
        (["--tetris-budget", "lots"], "lots"),
        (
            ["--tetris-verify", "rejection", "--speculative-eagle-topk", "2"],
            "sampled trees",
        ),
        (["--tetris-cost-table", "/nowhere"], "--tetris-cost-table"),
        (["--tetris-config", '{"max_draft": 1}'], "max_drafts"),
        (["--enable-lora"], "LoRA"),
        ([*SHAPE, "9"], "9"),
        (["--attention-backend", "torch_native"], "torch_native"),
        (["--tetris-budgets", "1"], "--tetris-budgets"),
    ):
        status, error = launch(argv(draft, *more))
        assert status not in (0, -9)
        assert names in error


def test_a_missing_draft(launch, argv, tmp_path: Path) -> None:
    status, error = launch(argv(tmp_path / "nowhere"))
    assert status not in (0, -9)
    assert "nowhere" in error
    status, error = launch(argv(""))
    assert status not in (0, -9)
    assert "--speculative-draft-model-path" in error


def test_another_vocabulary(launch, argv, model_root: Path) -> None:
    small = models.make_standalone_draft(model_root, models.LAW_SHAPE)
    status, error = launch(argv(small))
    assert status not in (0, -9)
    assert "64" in error
    assert "512" in error


def test_an_eagle3_head_as_eagle(launch, argv, model_root: Path) -> None:
    draft = models.make_eagle3_draft(model_root)
    status, error = launch(argv(draft, "--tetris-draft", "eagle"))
    assert status not in (0, -9)
    assert "eagle3" in error


def test_a_corrupt_config_with_the_real_command(
    argv, model_root: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(models.make_eagle_draft(model_root), broken)
    (broken / "config.json").write_text("{")
    done = subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", *argv(broken)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        check=False,
    )
    assert done.returncode != 0
    (error,) = [row for row in done.stderr.splitlines() if "error:" in row]
    assert str(broken) in error
    assert "Traceback" not in done.stderr
