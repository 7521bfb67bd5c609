"""What a measurement was made on."""

import os
import platform
from pathlib import Path

import psutil
import torch


def machine() -> dict[str, object]:
    """Return the machine as JSON values; accelerator is None where there is none."""
    has_gpu = torch.cuda.is_available()
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "accelerator": torch.cuda.get_device_name(0) if has_gpu else None,
        "system": f"{platform.system()} {platform.machine()}",
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else ()
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
