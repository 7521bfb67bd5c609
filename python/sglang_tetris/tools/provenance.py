"""Where and how a result came about: command, commit, versions, machine, dates."""

import hashlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sglang_tetris.tools.machine import machine

# Of the source tree; of an installed copy, a folder that is no repository's root.
ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (
    *("sglang", "sglang-tetris", "torch", "transformers", "flashinfer_python"),
    *("numpy", "numba"),
)


def utc_now() -> str:
    """Return the time as an ISO string, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def module_command(module: str, arguments: Sequence[str] | None) -> list[str]:
    """Return what `provenance` takes of `python -m module`; None: of the process."""
    return ["-m", module, *(sys.argv[1:] if arguments is None else arguments)]


def provenance(command: Sequence[str] | None = None) -> dict[str, Any]:
    """Return everything about this run but its results; `finished` is the caller's.

    command  what stands after `python`; None: this process's script and arguments

    commit and uncommitted_changes are None for a copy that is not a repository's, and a
    version is None where that package is not installed.
    """
    # Results of a run before this one are no change of what is run.
    status = _git("status", "--porcelain", "--", ".", ":(exclude)benchmark/*/results/*")
    return {
        "command": shlex.join(["python", *_below_root(command or sys.argv)]),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": None if status is None else bool(status),
        "versions": {name: _version(name) for name in PACKAGES}
        | {"python": platform.python_version()},
        "machine": machine(),
        # Above the number of cores, others were at work and the ratios suffer.
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "started": utc_now(),
    }


def sha256_of(paths: Iterable[Path]) -> dict[str, str]:
    """Return the digests of files by name: a path alone does not say what was read."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _below_root(arguments: Sequence[str]) -> list[str]:
    return [argument.removeprefix(f"{ROOT}/") for argument in arguments]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    # An installed copy may lie inside a repository, which is then someone else's.
    top = _run_git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != ROOT:
        return None
    return _run_git(*arguments)


def _run_git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True
        )
    except OSError:  # git is not installed
        return None
    return done.stdout.strip() if done.returncode == 0 else None
