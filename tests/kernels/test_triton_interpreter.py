"""The Triton kernels on a CPU, under the test body that the core's versions share.

In a process of its own: the interpreter is chosen when triton is imported, and would
otherwise serve every other Triton function of this process, SGLang's among them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = [
    *("test_survival.py", "test_allocator.py", "test_layout.py"),
    "test_properties.py",
]


def test_the_shared_tests_pass_on_interpreted_kernels():
    pytest.importorskip("triton")
    files = [str(ROOT / "tests" / "unit" / "core" / name) for name in SHARED]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
    # That many tests are not run by accident, and each file has some.
    for name in SHARED:
        passed = re.findall(rf"{name}::\S+\[triton.*\] PASSED", done.stdout)
        assert len(passed) >= 5, done.stdout[-10_000:]
