"""A server's trace becomes a recording, or one sentence says why it cannot."""

import itertools
import json

import numpy as np
import pytest

from sglang_tetris.core.replay import TRACE_FORMAT, read_replay, write_replay
from sglang_tetris.tools.simulate import load_replay
from sglang_tetris.tools.trace_replay import join_request, join_trees

TEXT = [5, 6, 7, 8]
HEADER = {"format": TRACE_FORMAT, "draft": "eagle", "num_steps": 2, "topk": 2}


def entry(position: int, **changed) -> dict:
    """A tree of two levels: at the root 5 and the right token, below it 9 and 7."""
    right = TEXT[position]
    return {
        "rid": "a",
        "prompt_tokens": 12,
        "position": position,
        "sampling_class": 1,
        "parents": [-1, -1, 1, 1],
        "probs": [0.25, 0.5, 0.5, 0.25],
        "kept": [],
        "path": [],
        "tokens": [1, right, 9, 7],
        "emitted": [right],
    } | changed


def write(path, *entries: dict, header: dict = HEADER):
    lines = [header, *({"round": 1, "requests": [own]} for own in entries)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_what_the_target_chose_is_the_path(tmp_path) -> None:
    path = write(tmp_path / "t.jsonl", *(entry(p) for p in range(4)))
    replay = load_replay(path)
    assert replay.row_starts.tolist() == [0, 4]
    # 7 follows 6: there both levels are right; elsewhere the first alone.
    assert replay.is_correct.sum(1).tolist() == [1, 2, 1, 1]
    assert replay.is_correct[:, 1].all()
    (request,) = replay.header.requests
    assert (request.prompt_tokens, request.sampling_class) == (12, 1)
    assert (replay.header.topk, replay.header.num_steps) == (2, 2)
    assert np.array_equal(replay.parents[0], [-1, -1, 1, 1])


@pytest.mark.parametrize(
    "entries",
    [
        (entry(0), entry(2)),
        ({k: v for k, v in entry(0).items() if k not in ("tokens", "emitted")},),
    ],
    ids=["a position is missing", "no tokens"],
)
def test_a_trace_of_other_rounds_cannot_be_followed(tmp_path, entries) -> None:
    path = write(tmp_path / "t.jsonl", *entries)
    with pytest.raises(ValueError, match=r'cannot be replayed.*"draft_always": true'):
        load_replay(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ('{"format": "other"}', "format must be"),
        (json.dumps(HEADER) + "\n{}\n", "requests"),
        (json.dumps(HEADER) + "\n{", "Expecting"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path, text: str, reason: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"(?s)t.jsonl.*{reason}"):
        load_replay(path)


def test_two_trees_of_a_position_are_one() -> None:
    chain = entry(0, tokens=[5, 6, 7], parents=[-1, 0, 1], probs=[0.5, 0.5, 0.5])
    tree = entry(0, tokens=[1, 5, 9], parents=[-1, -1, 1], probs=[0.2, 0.5, 1e-4])
    parents, probs, path = join_trees(chain, tree, [5, 6, 8])
    # 9 is reached too rarely; 5 is in both.
    assert parents == [-1, -1, 1, 2]
    assert probs == [0.2, 0.5, 0.5, 0.5]
    assert path == [1, 2]


def test_two_servers_must_have_emitted_the_same_text() -> None:
    one, two = [entry(0)], [entry(0, emitted=[99])]
    with pytest.raises(RuntimeError, match="two texts at a, position 0"):
        join_request(one, two)


def test_the_same_recording_gives_the_same_bytes(tmp_path, monkeypatch) -> None:
    hours = itertools.count(0, 3600)
    monkeypatch.setattr("gzip.time.time", lambda: next(hours))
    replay = load_replay(write(tmp_path / "t.jsonl", *(entry(p) for p in range(4))))
    positions = [(0, p, [-1], [0.5], [0] if p % 2 else []) for p in range(4)]
    paths = [tmp_path / "deep" / "one.jsonl.gz", tmp_path / "two.jsonl.gz"]
    for path in paths:
        write_replay(path, replay.header, positions)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert read_replay(paths[0]).is_correct.any(1).tolist() == [False, True] * 2
