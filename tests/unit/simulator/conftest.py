"""One small made-up recording for all tests here."""

from pathlib import Path

import pytest

from sglang_tetris.core.replay import read_replay
from sglang_tetris.simulator.forests import Recording
from tests.unit.simulator.synthetic import write_synthetic_replay


@pytest.fixture(scope="session")
def trace(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "small.replay.jsonl.gz"
    write_synthetic_replay(path, num_requests=24, tokens=(40, 90))
    return path


@pytest.fixture(scope="session")
def recording(trace: Path) -> Recording:
    return Recording.from_replay(read_replay(trace))
