"""A trace holds the rounds, no text unless asked for, and never stops a server."""

import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang_tetris.adapter.request_settings import RequestSettings
from sglang_tetris.adapter.round_clock import Lap
from sglang_tetris.adapter.round_view import RoundView
from sglang_tetris.adapter.trace import TraceWriter, check_writable
from sglang_tetris.core import (
    TetrisConfigError,
    build_verify_plan,
    match_tree,
    select_draft_tokens,
)
from sglang_tetris.core.auto_policy import Load, RoundPlan
from tests.reference.forests import trees_of


def record(path, *, tokens: bool, rounds: int = 1) -> list[dict]:
    trees = trees_of([(7, -1, 0.5), (8, 0, 0.25), (9, -1, 0.125)], [])
    allocation = select_draft_tokens(trees, draft_budget=2)
    plan = build_verify_plan(
        trees,
        allocation,
        anchors=torch.tensor([1, 2]),
        prefix_lens=torch.tensor([5, 6]),
    )
    accepted = match_tree(plan, torch.tensor([7, 4, 4, 3]))
    own = RequestSettings(limit=None, weight=1.0, target_tpot_ms=None, sampling_class=2)
    view = RoundView(
        settings=[own, own],
        caps=[3, 3],
        pool_rows=[0, 1],
        seq_lens=[5, 6],
        load=Load(batch_size=2, num_drafting=2, total_kv_tokens=11),
    )
    reqs = [SimpleNamespace(rid=rid, output_ids=[1, 1]) for rid in ("a", "b")]
    writer = TraceWriter(str(path), {"topk": 2}, tokens=tokens)
    for _ in range(rounds):
        laps = [Lap("verify", 4, 2, 11, 0.25)]
        writer.record_round_host(
            reqs, view, RoundPlan(depth=2), 2, laps, trees, allocation, plan, accepted
        )
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_round_is_one_line_with_its_trees(tmp_path) -> None:
    header, line = record(tmp_path / "trace", tokens=False)
    assert header == {"format": "sglang_tetris.trace/1", "topk": 2}
    assert line["round"] == 1
    assert (line["batch_size"], line["depth"], line["draft_budget"]) == (2, 2, 2)
    assert line["laps"] == [["verify", 4, 2, 11, 0.25]]
    (entry,) = line["requests"]
    assert entry == {
        "rid": "a",
        "position": 2,
        "sampling_class": 2,
        "parents": [-1, 0, -1],
        "probs": [0.5, 0.25, 0.125],
        "kept": [0, 2],
        "path": [0],
    }, "the request without drafts is left out"


def test_tokens_are_the_users_text_and_written_only_if_asked_for(tmp_path) -> None:
    _, line = record(tmp_path / "trace", tokens=True)
    (entry,) = line["requests"]
    assert entry["tokens"] == [7, 8, 9]
    assert entry["emitted"] == [7, 4]


def test_an_old_file_is_replaced(tmp_path) -> None:
    path = tmp_path / "trace"
    path.write_text("old\n")
    assert len(record(path, tokens=False)) == 2


def test_a_file_that_cannot_be_made_is_one_sentence(tmp_path) -> None:
    with pytest.raises(TetrisConfigError, match="--tetris-trace must be a file"):
        check_writable(str(tmp_path / "none" / "trace"))


def test_a_full_disk_ends_the_trace_and_is_said_once(tmp_path, caplog) -> None:
    path = tmp_path / "full"
    path.symlink_to("/dev/full")
    writer = TraceWriter(str(path), {}, tokens=False)
    trees = trees_of([])
    allocation = select_draft_tokens(trees, draft_budget=0)
    zeros = torch.zeros(1, dtype=torch.int64)
    plan = build_verify_plan(trees, allocation, anchors=zeros, prefix_lens=zeros)
    load = Load(batch_size=1, num_drafting=1, total_kv_tokens=0)
    view = RoundView(settings=[], caps=[0], pool_rows=[0], seq_lens=[0], load=load)
    accepted = match_tree(plan, zeros)
    for _ in range(3):
        writer.record_round_host(
            [SimpleNamespace(rid="a", output_ids=[])],
            view,
            RoundPlan(depth=0),
            0,
            [],
            trees,
            allocation,
            plan,
            accepted,
        )
    assert caplog.text.count("the trace ends here") == 1
