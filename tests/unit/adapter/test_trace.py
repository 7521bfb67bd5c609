"""A trace holds the rounds, no text unless asked for, and never stops a server."""

import json

import pytest

pytest.importorskip("sglang")

from sglang_tetris.adapter.round_clock import Lap
from sglang_tetris.adapter.trace import TraceWriter, check_writable
from sglang_tetris.core import TetrisConfigError
from tests.reference.forests import trees_of
from tests.unit.adapter.records import finished


def record(path, *, tokens: bool, rounds: int = 1) -> None:
    trees = trees_of([(7, -1, 0.5), (8, 0, 0.25), (9, -1, 0.125)], [])
    done = finished(trees, [7, 4, 4, 3], budget=2, sampling_class=2)
    writer = TraceWriter(str(path), {"topk": 2}, tokens=tokens)
    for _ in range(rounds):
        writer.record_round_host(done, [Lap("verify", 4, 2, 11, 0.25)])


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_round_is_one_line_with_its_trees(tmp_path) -> None:
    record(tmp_path / "trace", tokens=False)
    header, line = lines_of(tmp_path / "trace")
    assert header == {"format": "sglang_tetris.trace/1", "topk": 2}
    assert line["round"] == 1
    assert (line["batch_size"], line["depth"], line["draft_budget"]) == (2, 2, 2)
    assert line["laps"] == [["verify", 4, 2, 11, 0.25]]
    (entry,) = line["requests"]
    assert entry == {
        "rid": "r-0",
        "prompt_tokens": 3,
        "position": 2,
        "sampling_class": 2,
        "parents": [-1, 0, -1],
        "probs": [0.5, 0.25, 0.125],
        "kept": [0, 2],
        "path": [0],
    }, "the request without drafts is left out"


def test_tokens_are_the_users_text_and_written_only_if_asked_for(tmp_path) -> None:
    record(tmp_path / "trace", tokens=True)
    _, line = lines_of(tmp_path / "trace")
    (entry,) = line["requests"]
    assert entry["tokens"] == [7, 8, 9]
    assert entry["emitted"] == [7, 4]


def test_an_old_file_is_replaced(tmp_path) -> None:
    path = tmp_path / "trace"
    path.write_text("old\n")
    record(path, tokens=False)
    assert len(lines_of(path)) == 2


def test_a_file_that_cannot_be_made_is_one_sentence(tmp_path) -> None:
    with pytest.raises(TetrisConfigError, match="--tetris-trace must be a file"):
        check_writable(str(tmp_path / "none" / "trace"))


def test_a_full_disk_ends_the_trace_and_is_said_once(tmp_path, caplog) -> None:
    path = tmp_path / "full"
    path.symlink_to("/dev/full")
    record(path, tokens=False, rounds=3)
    assert caplog.text.count("the trace ends here") == 1
