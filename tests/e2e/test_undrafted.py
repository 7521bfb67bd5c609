"""Rounds without drafts are plain decode steps, and the draft finds its way back.

The budget changes while requests run, so that drafted and undrafted rounds alternate.
What the draft proposes afterwards must be what it would have proposed had it never
stopped, unless more was emitted in between than is kept: then it starts after the gap,
and never reads what it has not written.
"""

import json
import threading
import time
from pathlib import Path

import pytest

from tests.e2e import models
from tests.e2e.pool import (
    ServerPool,
    assert_same_tokens,
    set_budget,
    tetris_flags,
    tetris_info,
)
from tests.e2e.servers import Server
from tests.e2e.test_exactness_tiny import SHAPES, draft_path, prompts

NEW_TOKENS = 160
SWITCHES = {"SGLANG_TETRIS_TEST_SWITCHES": "1"}


def start(
    pool: ServerPool, root: Path, shape: str, kept: int, **config: object
) -> tuple[Server, Path]:
    """Return a server and its trace."""
    kind, tree = SHAPES[shape]
    target = models.make_target(root)
    trace = root / f"undrafted-{shape}-{kept}.jsonl"
    settings = json.dumps({"kept_tokens": kept, "trace_tokens": True, **config})
    flags = (
        *tetris_flags(draft_path(kind, root), **tree),
        *("--tetris-trace", str(trace), "--tetris-config", settings),
    )
    return pool.get(target, flags, env=SWITCHES), trace


def alternate(server: Server, budgets: tuple[str, ...], stop: threading.Event) -> None:
    while not stop.is_set():
        for budget in budgets:
            server.post("/tetris/budget", {"draft_budget": budget})
            time.sleep(0.05)


def generate_alternating(
    server: Server, budgets: tuple[str, ...], **params: object
) -> list[dict]:
    stop = threading.Event()
    thread = threading.Thread(target=alternate, args=(server, budgets, stop))
    thread.start()
    try:
        return server.generate(prompts(), max_new_tokens=NEW_TOKENS, **params)
    finally:
        stop.set()
        thread.join()


def entries_since(trace: Path, line: int) -> dict[tuple[int, ...], list]:
    """Trees of a trace by the text before them: (prompt's place, position)."""
    found = {}
    for text in trace.read_text().splitlines()[line:]:
        for entry in json.loads(text).get("requests", ()):
            place = int(entry["rid"].rsplit("-", 1)[1])
            key = (place, entry["position"])
            found[key] = list(zip(entry["tokens"], entry["probs"], strict=True))
    return found


def num_lines(trace: Path) -> int:
    return len(trace.read_text().splitlines())


def rids(name: str) -> dict:
    return {"request": {"rid": [f"{name}-{i}" for i in range(len(prompts()))]}}


@pytest.mark.parametrize("shape", ["eagle-tree", "eagle3-tree", "standalone-chain"])
def test_drafts_after_a_pause_are_what_they_would_have_been(
    pool: ServerPool, model_root: Path, shape: str
) -> None:
    # First, since the pool may stop a server to start another.
    target = models.make_target(model_root)
    wanted = pool.plain(target, prompts(), max_new_tokens=NEW_TOKENS)
    server, trace = start(pool, model_root, shape, kept=512)
    set_budget(server, "1x")
    begin = num_lines(trace)
    replies = server.generate(prompts(), max_new_tokens=NEW_TOKENS, **rids("always"))
    assert_same_tokens([r["output_ids"] for r in replies], wanted, prompts())
    always = entries_since(trace, begin)
    server.flush_cache()
    begin = num_lines(trace)
    replies = generate_alternating(server, ("0", "2x"), **rids("paused"))
    assert_same_tokens([r["output_ids"] for r in replies], wanted, prompts())
    paused = entries_since(trace, begin)
    both = sorted(set(always) & set(paused))
    assert len(both) >= 20, "positions at which both runs drafted"
    depths = [
        json.loads(text)["depth"] for text in trace.read_text().splitlines()[begin:]
    ]
    assert 0 in depths, "undrafted rounds came in between"
    assert max(depths) > 0
    for key in both:
        for (token, prob), (other, other_prob) in zip(
            always[key], paused[key], strict=True
        ):
            assert prob == pytest.approx(other_prob, rel=2e-2, abs=1e-4), key
            assert token == other or prob == pytest.approx(other_prob, rel=1e-3)


@pytest.mark.parametrize("shape", ["eagle-chain", "self-chain"])
def test_a_gap_changes_no_token_and_is_never_read(
    pool: ServerPool, model_root: Path, shape: str
) -> None:
    """Turn 1 undrafted and longer than is kept; turn 2 hits it in the cache."""
    target = models.make_target(model_root)
    wanted = pool.plain(target, prompts(), max_new_tokens=60)
    asked = [[*pair[0], *pair[1], 3] for pair in zip(prompts(), wanted, strict=True)]
    oracle = pool.plain(target, asked, max_new_tokens=24)
    server, trace = start(pool, model_root, shape, kept=8)
    seen = []
    for value in (0, 1000):
        set_budget(server, "0")
        server.flush_cache()
        server.post(
            "/set_internal_state",
            {"server_args": {"tetris_test_spoil_draft_kv": value}},
        )
        first = server.generate(prompts(), max_new_tokens=60)
        assert_same_tokens([r["output_ids"] for r in first], wanted, prompts())
        set_budget(server, "2x")
        begin = num_lines(trace)
        second = server.generate(asked, max_new_tokens=24, **rids(f"turn{value}"))
        assert_same_tokens([r["output_ids"] for r in second], oracle, asked)
        assert all(r["meta_info"]["cached_tokens"] > 40 for r in second)
        seen.append(entries_since(trace, begin))
    without, spoiled = seen
    assert len(without) > 20
    common = set(without) & set(spoiled)
    assert common
    for key in common:
        assert without[key] == spoiled[key], "an unwritten slot was read"


@pytest.mark.parametrize("shape", ["eagle-tree", "standalone-chain"])
def test_budget_0_drafts_nothing_and_runs_no_draft_forward(
    pool: ServerPool, model_root: Path, shape: str
) -> None:
    server, trace = start(pool, model_root, shape, kept=512)
    set_budget(server, "0")
    server.flush_cache()
    before, begin = tetris_info(server)["totals"], num_lines(trace)
    (reply,) = server.generate(prompts(1), max_new_tokens=20)
    after = tetris_info(server)
    assert after["plan"] == {"depth": 0, "reason": "fixed"}
    assert after["totals"]["num_proposed_drafts"] == before["num_proposed_drafts"]
    assert reply["meta_info"]["spec_verify_ct"] == 19
    rounds = [json.loads(text) for text in trace.read_text().splitlines()[begin:]]
    assert len(rounds) == 19
    phases = {lap[0] for line in rounds for lap in line["laps"]}
    assert phases == {"prompt", "decode", "sample_greedy", "outside"}


@pytest.mark.server("self-chain")
def test_a_prompt_that_the_draft_did_not_read_is_read_when_drafting_begins(
    pool: ServerPool, model_root: Path
) -> None:
    """Draft = target: every verified draft is right, also just after the change.

    Six prompts of less than the 64 tokens that are kept.
    """
    target = models.make_target(model_root)
    wanted = pool.plain(target, prompts(6), max_new_tokens=40)
    server = pool.get(target, tetris_flags(target))
    server.flush_cache()
    set_budget(server, "0")
    # Its rounds are over in a second or two; the budget changes in between.
    timer = threading.Timer(0.1, set_budget, args=(server, "3x"))
    timer.start()
    try:
        replies = server.generate(prompts(6), max_new_tokens=40)
    finally:
        timer.join()
    assert_same_tokens([r["output_ids"] for r in replies], wanted, prompts(6))
    verified = [r["meta_info"]["spec_num_verify_drafts"] for r in replies]
    correct = [r["meta_info"]["spec_num_correct_drafts"] for r in replies]
    assert sum(verified) > 0
    assert correct == verified


@pytest.mark.server("self-chain")
def test_requests_that_draft_and_that_do_not_share_a_round(
    pool: ServerPool, model_root: Path
) -> None:
    """Draft = target: each verified draft is right, whoever else drafts."""
    target = models.make_target(model_root)
    wanted = pool.plain(target, prompts(), max_new_tokens=32)
    server = pool.get(target, tetris_flags(target))
    set_budget(server, "3x")
    params = [
        {
            "max_new_tokens": 32,
            "temperature": 0,
            "ignore_eos": True,
            "custom_params": {"tetris": {"max_drafts": 0 if place % 2 else 3}},
        }
        for place in range(len(prompts()))
    ]
    replies = server.post(
        "/generate", {"input_ids": prompts(), "sampling_params": params}
    )
    assert_same_tokens([r["output_ids"] for r in replies], wanted, prompts())
    for place, reply in enumerate(replies):
        meta = reply["meta_info"]
        assert meta["spec_num_correct_drafts"] == meta["spec_num_verify_drafts"]
        assert (meta["spec_num_verify_drafts"] == 0) is bool(place % 2)


def test_a_trace_has_prompt_steps_and_no_warm_up(
    pool: ServerPool, model_root: Path
) -> None:
    server, trace = start(pool, model_root, "eagle-tree", kept=512)
    server.flush_cache()
    set_budget(server, "1x")
    begin = num_lines(trace)
    server.generate([list(range(5, 25))], max_new_tokens=4)
    header, *lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert header["topk"] == SHAPES["eagle-tree"][1]["topk"]
    entries = [entry for line in lines for entry in line["requests"]]
    assert not [own for own in entries if own["rid"].startswith("warm-up")]
    laps = [lap for line in lines[begin - 1 :] for lap in line["laps"]]
    assert [lap[:4] for lap in laps if lap[0] == "prompt"] == [["prompt", 20, 1, 20]]
    assert ["draft_extend", 20, 1, 20] in [lap[:4] for lap in laps]
