"""Prefix caching is what it is without trimming.

A standalone draft's KV depends on no later token, so its server reuses what plain
decoding reuses. An EAGLE head's KV at position i needs token i + 1: the tree is keyed
by token pairs, one less, as with SGLang's own EAGLE.
"""

from pathlib import Path

import pytest

from tests.e2e import models
from tests.e2e.pool import (
    PLAIN,
    ServerPool,
    assert_same_tokens,
    set_budget,
    tetris_flags,
)
from tests.e2e.servers import Server
from tests.e2e.test_exactness_tiny import SHAPES, draft_path, prompts

TURNS = 6
STOCK_EAGLE = (
    *("--speculative-algorithm", "EAGLE"),
    *("--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4"),
)


def _conversation(server: Server) -> tuple[list[int], list[list[int]]]:
    """Ask the same prompt twice, then go on for TURNS; cached counts and answers."""
    cached, answers = [], []
    prompt = prompts()[3]
    for turn in range(TURNS + 1):
        (reply,) = server.generate([prompt], max_new_tokens=12)
        cached.append(reply["meta_info"]["cached_tokens"])
        answers.append(reply["output_ids"])
        if turn > 0:  # the first prompt is asked twice
            prompt = [*prompt, *reply["output_ids"], 7, 20 + turn, 9]
    return cached, answers


@pytest.fixture(scope="module")
def plain_conversation(pool: ServerPool, model_root: Path):
    return _conversation(pool.get(models.make_target(model_root), PLAIN))


@pytest.mark.parametrize("shape", ["standalone-chain", "eagle-chain", "eagle3-tree"])
def test_cached_tokens_of_a_repeat_and_six_turns(
    pool: ServerPool, model_root: Path, plain_conversation, shape: str
) -> None:
    kind, tree = SHAPES[shape]
    target = models.make_target(model_root)
    server = pool.get(target, tetris_flags(draft_path(kind, model_root), **tree))
    set_budget(server, "3x")
    server.flush_cache()
    cached, answers = _conversation(server)
    plain_cached, plain_answers = plain_conversation
    assert_same_tokens(answers, plain_answers, answers)
    less = 0 if kind == "standalone" else 1
    assert cached == [0, *(count - less for count in plain_cached[1:])]


def test_cached_tokens_equal_stock_eagles(pool: ServerPool, model_root: Path) -> None:
    target = models.make_target(model_root)
    draft = str(models.make_eagle_draft(model_root))
    flags = (*STOCK_EAGLE, "--speculative-draft-model-path", draft)
    stock, _ = _conversation(pool.get(target, flags))
    server = pool.get(target, tetris_flags(draft))
    server.flush_cache()
    ours, _ = _conversation(server)
    assert ours == stock


def test_a_cached_prefix_keeps_the_draft_right(
    pool: ServerPool, model_root: Path
) -> None:
    """Draft = target: were the draft's KV of a cached prefix stale, it would show."""
    target = models.make_target(model_root)
    server = pool.get(target, tetris_flags(target))
    set_budget(server, "3x")
    server.flush_cache()
    prompt = prompts()[6]
    for _ in range(3):
        (reply,) = server.generate([prompt], max_new_tokens=17)
        meta = reply["meta_info"]
        assert meta["spec_num_correct_drafts"] == meta["spec_num_verify_drafts"]
        prompt = [*prompt, *reply["output_ids"]]
    assert meta["cached_tokens"] > len(prompts()[6])
