"""Fixtures of the tests that start servers."""

import os
from pathlib import Path

import pytest

from tests.e2e.pool import ServerPool, pool

__all__ = ["pool"]

# Two workers on a machine of two cores: a server's second thread would only be in the
# other's way.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Modules that ask for the same servers of tiny models.
SHARING = ("exactness_tiny", "requests", "sampling", "cache", "soak")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests that share servers to one worker, server by server.

    The server that a test uses most is its mark `server`, or its parameter `shape`.
    All other tests come first, while no server is in the way.
    """
    here = Path(__file__).parent
    names = {
        item: item.path.stem.removeprefix("test_")
        for item in items
        if item.path.is_relative_to(here)
    }
    sharing = [item for item in items if names.get(item) in SHARING]
    for item, name in names.items():
        group = "tiny" if item in sharing else name
        item.add_marker(pytest.mark.xdist_group(group))
    servers = list(dict.fromkeys(map(_server_of, sharing)))
    sharing.sort(key=lambda item: servers.index(_server_of(item)))
    own = [item for item in names if item not in sharing]
    items[:] = [*(item for item in items if item not in names), *sharing, *own]


def _server_of(item: pytest.Item) -> str:
    mark = item.get_closest_marker("server")
    return mark.args[0] if mark else item.callspec.params["shape"]


@pytest.fixture(scope="module", autouse=True)
def _room(request: pytest.FixtureRequest, pool: ServerPool) -> None:
    """Stop the servers of earlier modules where none of them is asked for again."""
    if request.path.stem.removeprefix("test_") not in SHARING:
        pool.close()


@pytest.fixture(scope="session")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the session's tiny models lie."""
    return tmp_path_factory.mktemp("models")
