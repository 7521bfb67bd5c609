"""Recordings: what is written is read, and what is no recording is refused."""

import gzip
import json
from pathlib import Path

import pytest

from sglang_tetris.core.replay import (
    ReplayHeader,
    ReplayRequest,
    read_replay,
    write_replay,
)

HEADER = ReplayHeader(
    requests=(
        ReplayRequest(kind="chat", sampling_class=0, prompt_tokens=57),
        ReplayRequest(kind="code", sampling_class=2, prompt_tokens=9),
    ),
    max_chain=8,
    num_steps=4,
    topk=3,
    provenance={"model": "none"},
)
POSITIONS = [
    (0, 1, [-1, -1, 0], [0.6, 0.2, 0.5], [0, 2]),
    (0, 2, [-1], [0.25], []),
    (1, 5, [], [], []),
]


@pytest.mark.parametrize("name", ["a.replay.jsonl", "a.replay.jsonl.gz"])
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    write_replay(tmp_path / name, HEADER, POSITIONS)
    found = read_replay(tmp_path / name)
    assert found.header == HEADER
    assert found.row_starts.tolist() == [0, 2, 3]
    assert found.first_positions.tolist() == [1, 5]
    assert found.num_nodes.tolist() == [3, 1, 0]
    assert found.parents.tolist() == [[-1, -1, 0], [-1, -1, -1], [-1, -1, -1]]
    assert found.probs[0].tolist() == pytest.approx([0.6, 0.2, 0.5])
    assert found.probs[1, 1:].tolist() == [0, 0]
    assert found.is_correct.tolist() == [
        [True, False, True],
        [False, False, False],
        [False, False, False],
    ]


def test_a_name_without_gz_is_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "a.replay.jsonl"
    write_replay(path, HEADER, POSITIONS)
    assert json.loads(path.read_text().splitlines()[0])["tree"] == {
        "num_steps": 4,
        "topk": 3,
    }
    with pytest.raises(gzip.BadGzipFile), gzip.open(path) as file:
        file.read()


def written(path: Path, *lines: object) -> Path:
    header = json.loads(HEADER.to_json())
    text = [json.dumps(line) for line in (header, *lines)]
    path.write_text("\n".join(text) + "\n")
    return path


def line(r: int, p: int, **fields: object) -> dict[str, object]:
    return {"r": r, "p": p, "parents": [], "probs": [], "path": [], **fields}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (line(0, 3), "r 0, p 3 cannot follow r 0, p 1"),
        (line(0, 1), "r 0, p 1 cannot follow r 0, p 1"),
        (line(2, 0), "r must be below 2, got 2"),
        (line(0, 2, parents=[-1]), "1 parents for 0 probs"),
        (line(0, 2, parents=[0], probs=[0.5]), "earlier node or -1, got 0"),
        (line(0, 2, parents=[-1], probs=[1.5]), "in [0, 1], got 1.5"),
        (line(0, 2, parents=[-1], probs=[float("nan")]), "in [0, 1], got nan"),
        (line(0, 2, parents=[-1, 0], probs=[0.5] * 2, path=[1]), "child to child"),
        ({"r": 0}, "no position: 'p'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: dict, said: str) -> None:
    path = written(tmp_path / "a.jsonl", line(0, 1), bad, line(1, 0))
    with pytest.raises(ValueError, match="line 3") as caught:
        read_replay(path)
    assert said in str(caught.value)


def test_a_recording_that_ends_early_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", line(0, 1))
    with pytest.raises(ValueError, match="names 2 requests"):
        read_replay(path)


@pytest.mark.parametrize("first", ["", "{}", '{"format": "other/1"}', "[]"])
def test_a_file_without_the_header_is_refused(tmp_path: Path, first: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(first + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl"):
        read_replay(path)


def test_prompts_of_unknown_length_count_as_64_tokens(tmp_path: Path) -> None:
    fields = json.loads(HEADER.to_json())
    del fields["requests"][0]["prompt_tokens"]
    # What the simulator does not need is left alone.
    fields["requests"][0]["num_tokens"] = 20
    found = ReplayHeader.from_json(json.dumps(fields))
    assert [request.prompt_tokens for request in found.requests] == [64, 9]
