"""Where and how a result came about: command, commit, versions, machine, dates."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from sglang_tetris.tools.machine import machine

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("sglang", "sglang-tetris", "torch", "transformers", "flashinfer_python")


def utc_now() -> str:
    """Return the time as an ISO string, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def provenance() -> dict[str, object]:
    """Return everything about this run but its results; `finished` is the caller's."""
    return {
        "command": shlex.join(["python", *_below_root(sys.argv)]),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain")),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES}
        | {"python": platform.python_version()},
        "machine": machine(),
        # Above the number of cores, others were at work and the ratios suffer.
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "started": utc_now(),
    }


def _below_root(arguments: list[str]) -> list[str]:
    return [argument.removeprefix(f"{ROOT}/") for argument in arguments]


def _git(*arguments: str) -> str | None:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True
    )
    return done.stdout.strip() if done.returncode == 0 else None
