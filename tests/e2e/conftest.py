"""Fixtures of the tests that start servers."""

from pathlib import Path

import pytest

from tests.e2e.pool import pool

__all__ = ["pool"]


@pytest.fixture(scope="session")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the session's tiny models lie."""
    return tmp_path_factory.mktemp("models")
