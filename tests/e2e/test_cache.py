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


def _verified(reply: dict) -> int:
    """Tokens that the rounds and the prompt's step made, emitted or not."""
    meta = reply["meta_info"]
    return meta["spec_num_correct_drafts"] + meta["spec_verify_ct"] + 1


def _conversation(
    server: Server, replies: list[dict] | None = None
) -> tuple[list[int], list[list[int]]]:
    """Ask the same prompt twice, then go on for TURNS; cached counts and answers.

    The replies themselves are appended to `replies`.
    """
    cached, answers = [], []
    prompt = prompts()[3]
    for turn in range(TURNS + 1):
        (reply,) = server.generate([prompt], max_new_tokens=12)
        cached.append(reply["meta_info"]["cached_tokens"])
        answers.append(reply["output_ids"])
        if replies is not None:
            replies.append(reply)
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


@pytest.mark.server("eagle-chain")
def test_cached_tokens_equal_stock_eagles(pool: ServerPool, model_root: Path) -> None:
    """Token for token, but for the last token of an answer that stock overshot.

    Stock EAGLE goes on verifying drafts past max_new_tokens; where such a draft is
    right, it has the KV of the answer's last token, which plain decoding never has.
    Ours gives no request a draft that it cannot emit.
    """
    target = models.make_target(model_root)
    draft = str(models.make_eagle_draft(model_root))
    flags = (*STOCK_EAGLE, "--speculative-draft-model-path", draft)
    replies: list[dict] = []
    stock, _ = _conversation(pool.get(target, flags), replies)
    overshot = [_verified(r) > r["meta_info"]["completion_tokens"] for r in replies]
    # The repeat's prompt ends before the answer; its answer was in the tree twice.
    more = [0, 0, overshot[0] or overshot[1], *overshot[2:]]
    stock = [count - extra for count, extra in zip(stock, more, strict=False)]
    server = pool.get(target, tetris_flags(draft))
    server.flush_cache()
    ours, _ = _conversation(server)
    assert ours == stock


@pytest.mark.server("self-chain")
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
