"""Where and how a result came about: command, commit, versions, machine, dates."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import psutil

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
        "machine": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "accelerator": _accelerator(),
            "system": f"{platform.system()} {platform.machine()}",
        },
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


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _accelerator() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
