"""The core works without SGLang and without numba, and says which loops serve it."""

import subprocess
import sys

import pytest

from sglang_tetris.core import cpu_backend, warm_up
from sglang_tetris.core.cpu_select import kth_largest

FRESH = """
import sys
sys.modules["sglang"] = None  # importing it raises ImportError
import sglang_tetris.core as core
assert "numba" not in sys.modules, "numba is imported on first use only"
sys.modules["numba"] = None
assert core.warm_up() == "torch"
"""


def test_without_sglang_and_numba():
    done = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_warm_up_leaves_nothing_to_compile():
    pytest.importorskip("numba")
    assert warm_up() == cpu_backend() == "numba"
    # One signature, compiled ahead; a call with other types is refused, not compiled.
    assert kth_largest.signatures
    with pytest.raises(TypeError):
        kth_largest(None, 0, 0, 0, None)
