"""Compile the attention kernel once and keep it in the user's cache directory.

The file name holds a hash of the source, the compiler and the processor, so that a
cache shared between machines, or an upgrade, never loads the wrong code. Only a C
compiler is needed (``CC``, else ``cc``, ``gcc`` or ``clang``).
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("cpu_kernel.c")
_COMPILERS = ("cc", "gcc", "clang")
# OpenMP comes from the library that torch has loaded, so that both use one pool of
# threads; -march differs by architecture only in its spelling.
_FLAGS = ("-O3", "-fPIC", "-shared", "-fopenmp")


@cache
def load_kernel() -> ctypes.CDLL | None:
    """The compiled kernel, or None (with one warning) where it cannot be built."""
    compiler = _find_compiler()
    if compiler is None:
        logger.warning(
            "No C compiler found (set CC): attention on the CPU runs in plain torch, "
            "which is several times slower."
        )
        return None
    path = _cache_dir() / f"attention-{_fingerprint(compiler)}.so"
    if not path.exists():
        error = _compile(compiler, path)
        if error is not None:
            logger.warning(
                "%s could not build the CPU attention kernel; it runs in plain torch, "
                "which is several times slower. The compiler said: %s",
                compiler,
                error,
            )
            return None
    return ctypes.CDLL(str(path))


def _find_compiler() -> str | None:
    chosen = os.environ.get("CC")
    if chosen:
        return shutil.which(chosen)
    found = (shutil.which(name) for name in _COMPILERS)
    return next((path for path in found if path is not None), None)


def _compile(compiler: str, path: Path) -> str | None:
    """Build ``path``; the compiler's message where that fails."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        built = Path(scratch) / path.name
        command = [compiler, *_all_flags(), str(SOURCE), "-o", str(built), "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            return result.stderr.strip()[-2000:]
        # Two processes may build at once; a rename is atomic and either will do.
        built.replace(path)
    return None


def _all_flags() -> list[str]:
    arm = platform.machine() in ("aarch64", "arm64")
    return [*_FLAGS, "-mcpu=native" if arm else "-march=native"]


def _fingerprint(compiler: str) -> str:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    parts = (SOURCE.read_text(), version, " ".join(_all_flags()), _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    keys = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(keys)}))


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "sglang_tetris" / "kernels"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        path = Path(tempfile.mkdtemp(prefix="sglang_tetris_kernels_"))
    return path
