"""Compiles the CPU loops with numba, ahead of the first call.

Every function has one explicit signature: it is compiled, or read from numba's cache,
when its module is imported, so a call never compiles anything. No parallel loops: they
would hold threads that the server needs. No fast-math: the bits are part of the
contract.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba

P = ParamSpec("P")
R = TypeVar("R")


def compiled(signature: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that compiles a function for one signature, GIL released."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        try:
            jitted: Callable[P, R] = numba.njit(signature, nogil=True, cache=True)(
                function
            )
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            # Neither the package's folder nor the user's cache folder can be written.
            jitted = numba.njit(signature, nogil=True)(function)
        return jitted

    return decorate
