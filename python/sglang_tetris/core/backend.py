"""Chooses between the compiled CPU loops and the torch implementation.

Tensors on a CPU go to numba, which is imported on first use; tensors anywhere else, and
everything where numba is not installed, go to torch. Both give the same results, bit
for bit where the contract asks for it.
"""

import functools
import importlib
from typing import Any, Literal

import torch

from sglang_tetris.core.errors import on_plain_cpu


@functools.cache
def load_loops() -> Any:
    """Return the module of compiled CPU loops, or None where numba is missing."""
    try:
        import numba  # noqa: F401
    except ImportError:
        return None
    return importlib.import_module("sglang_tetris.core.cpu_loops")


def loops_for(tensor: torch.Tensor) -> Any:
    """Return the CPU loops if they can take this tensor, otherwise None."""
    return load_loops() if on_plain_cpu(tensor) else None


def host_loops() -> Any:
    """Return the CPU loops for work that is the host's anyway, or None."""
    return load_loops()


def cpu_backend() -> Literal["numba", "torch"]:
    """Name what serves CPU tensors here, for a server's start-up log."""
    return "torch" if load_loops() is None else "numba"
