"""One test body, both implementations."""

import pytest

from sglang_tetris.core import backend


@pytest.fixture(params=["numba", "torch"])
def implementation(request, monkeypatch):
    """Run a test on the compiled loops and on the torch operations."""
    if request.param == "torch":
        monkeypatch.setattr(backend, "load_loops", lambda: None)
    else:
        pytest.importorskip("numba")
    assert backend.cpu_backend() == request.param
    return request.param
