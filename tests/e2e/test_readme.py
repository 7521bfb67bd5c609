"""Every command of the README, run as it is printed there, on a CPU.

Only what a CPU cannot do as printed is changed: the GPU attention backend and the
8-billion model of the launch line, the port, and the number of benchmark prompts.
"""

import re
import shlex
import string
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_tetris.tools.arms import COMMON_FLAGS
from sglang_tetris.tools.prepare_model import prepare
from sglang_tetris.tools.server_process import free_port, running_command

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = dict(re.findall(r"<!-- test: (\w+) -->\n```bash\n(.*?)```", README, re.S))
GPU_ONLY = "--attention-backend flashinfer"
SHORT = {"--num-prompts 64": "--num-prompts 4", "output-len 64": "output-len 16"}
COMMAND_TIMEOUT_S = 900


def arguments_of(block: str, **variables: str) -> list[str]:
    """Return the one command of a README block as arguments, variables filled in."""
    lines = block.replace("\\\n", " ").splitlines()
    commands = [line for line in lines if not re.match(r"[A-Z]+=", line)]
    assert len(commands) == 1, commands
    arguments = shlex.split(string.Template(commands[0]).substitute(variables))
    assert arguments[0] == "python"
    return [sys.executable, *arguments[1:]]


def run(block: str, url: str) -> str:
    """Run a client block of the README against `url`; return what it printed."""
    block = block.replace("http://127.0.0.1:30000", url)
    done = subprocess.run(
        arguments_of(block),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The server of the README's launch line."""
    models = prepare()
    block = BLOCKS["launch"]
    assert block.count(GPU_ONLY) == 1
    command = arguments_of(
        block.replace(GPU_ONLY, ""), TARGET=str(models.target), DRAFT=str(models.eagle)
    )
    port = free_port()
    command[command.index("--port") + 1] = str(port)
    command += ["--dtype", "bfloat16", *COMMON_FLAGS]
    command += ["--speculative-token-map", str(models.hot_tokens)]
    log_path = tmp_path_factory.mktemp("readme") / "server.log"
    with running_command(command, port, log_path=log_path) as server:
        yield server.url


def test_readme_opens_with_the_two_commands():
    first = re.search(r"```bash\n(.*?)```", README, re.S).group(1)
    assert first == BLOCKS["make"]
    commands = [line.partition("#")[0].split() for line in first.splitlines()]
    assert commands == [["make", "demo"], ["make", "test"]]
    for command in commands:
        done = subprocess.run(
            [command[0], "-n", command[1]], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


def test_openai_client(url):
    printed = run(BLOCKS["openai"], url)
    assert re.search(r"\[[1-9]\d* tokens\]", printed)
    counts = dict(re.findall(r"^(spec_\w+): (\d+)$", printed, re.M))
    assert int(counts["spec_verify_ct"]) > 0
    assert int(counts["spec_num_verify_drafts"]) >= int(
        counts["spec_num_correct_drafts"]
    )


def test_frontend_program(url):
    printed = run(BLOCKS["frontend"], url)
    assert (
        len(re.findall(r"^the \w[\w ]* \((1\d{3}|20[0-2]\d)\): \w", printed, re.M)) == 3
    )
    assert re.search(
        r"^used most today: the (telephone|printing press|aeroplane)$", printed, re.M
    )


def test_bench_serving(url):
    block = BLOCKS["bench_serving"]
    for printed, short in SHORT.items():
        assert block.count(printed) == 1
        block = block.replace(printed, short)
    printed = run(block, url)
    assert re.search(r"Successful requests:\s+4\b", printed)
    assert re.search(r"Accept length:\s+[1-9]", printed)


def test_no_block_is_left_untested():
    assert set(BLOCKS) == {"make", "launch", "openai", "frontend", "bench_serving"}
    assert README.count("```bash") == len(BLOCKS)
