"""Compile the CPU kernels once and keep them in the user's cache directory.

The file name holds a hash of the sources, the compiler and the processor, so that a
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

import torch

logger = logging.getLogger(__name__)

# Numbers of the element types in csrc/vec.h.
ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1}

_SOURCE_DIR = Path(__file__).with_name("csrc")
_COMPILERS = ("cc", "gcc", "clang")
# OpenMP comes from the library that torch has loaded: it says how many threads
# torch.set_num_threads allows. The threads themselves are csrc/threads.c's own.
_FLAGS = ("-O3", "-fPIC", "-shared", "-pthread")
_OPENMP = "-fopenmp"


@cache
def load_library() -> ctypes.CDLL | None:
    """The compiled kernels, or None (with one warning) where they cannot be built."""
    compiler = _find_compiler()
    if compiler is None:
        _warn("no C compiler was found (install one, or set CC)")
        return None
    path = _cache_dir() / f"cpu-{_fingerprint(compiler)}.so"
    if not path.exists():
        error = _compile(compiler, (*_flags(), _OPENMP), path)
        if error is not None:
            logger.warning("%s has no OpenMP: one thread per kernel", compiler)
            error = _compile(compiler, _flags(), path)
        if error is not None:
            _warn(f"{compiler} could not build them: {error}")
            return None
    return ctypes.CDLL(str(path))


def check_struct(name: str, struct: type[ctypes.Structure]) -> None:
    """Raise where a C argument struct and its Python mirror differ in size."""
    size = getattr(load_library(), f"{name}_size")
    size.restype = ctypes.c_int64
    if size() != ctypes.sizeof(struct):
        raise RuntimeError(f"{struct.__name__} and the C struct of {name} differ")


def pointer(tensor: torch.Tensor | None) -> int | None:
    """A tensor's address, or a null pointer."""
    return None if tensor is None else tensor.data_ptr()


def _warn(reason: str) -> None:
    logger.warning(
        "The CPU kernels are not used: %s. Models run in plain torch, several times "
        "slower.",
        reason,
    )


def _find_compiler() -> str | None:
    chosen = os.environ.get("CC")
    if chosen:
        return shutil.which(chosen)
    found = (shutil.which(name) for name in _COMPILERS)
    return next((path for path in found if path is not None), None)


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> str | None:
    """Build ``path``; the compiler's message where that fails."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        built = Path(scratch) / path.name
        sources = [str(source) for source in sorted(_SOURCE_DIR.glob("*.c"))]
        command = [compiler, *flags, *sources, "-o", str(built), "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            return result.stderr.strip()[-2000:]
        # Two processes may build at once; a rename is atomic and either will do.
        built.replace(path)
    return None


def _flags() -> tuple[str, ...]:
    arm = platform.machine() in ("aarch64", "arm64")
    return (*_FLAGS, "-mcpu=native" if arm else "-march=native")


def _fingerprint(compiler: str) -> str:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    sources = [path.read_text() for path in sorted(_SOURCE_DIR.glob("*.[ch]"))]
    parts = (*sources, version, " ".join(_flags()), _processor())
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
