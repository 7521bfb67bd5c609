"""At temperature 0 every draft, tree and budget gives plain decoding's tokens.

Tiny random models in float32. A draft with the target's own weights must also have
every verified draft accepted: that is what shows that its KV, positions and masks are
right.
"""

import random
from pathlib import Path

import pytest

from tests.e2e import models
from tests.e2e.pool import (
    ServerPool,
    assert_same_tokens,
    set_budget,
    tetris_flags,
)

BUDGETS = ("0", "1", "16", "1x", "3x", "auto", "1000")
NEW_TOKENS = 32
CHAIN = {"steps": 3, "topk": 1}
TREE = {"steps": 3, "topk": 2, "width": 8}
SHAPES = {
    "eagle-chain": ("eagle", CHAIN),
    "eagle-tree": ("eagle", TREE),
    "eagle3-tree": ("eagle3", TREE),
    "standalone-chain": ("standalone", CHAIN),
    "standalone-tree": ("standalone", TREE),
    "self-chain": ("self", CHAIN),
    "self-tree": ("self", TREE),
}


def prompts(count: int = 8) -> list[list[int]]:
    draw = random.Random(1)
    lengths = (1, 3, 17, 40, 5, 9, 64, 130)
    return [[draw.randrange(2, 512) for _ in range(n)] for n in lengths[:count]]


def draft_path(kind: str, root: Path) -> Path:
    makers = {
        "eagle": models.make_eagle_draft,
        "eagle3": models.make_eagle3_draft,
        "standalone": models.make_standalone_draft,
        "self": models.make_target,
    }
    return makers[kind](root)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_budget_gives_plain_decodings_tokens(
    pool: ServerPool, model_root: Path, shape: str
) -> None:
    kind, tree = SHAPES[shape]
    target = models.make_target(model_root)
    wanted = pool.plain(target, prompts(), max_new_tokens=NEW_TOKENS)
    server = pool.get(target, tetris_flags(draft_path(kind, model_root), **tree))
    for budget in BUDGETS:
        set_budget(server, budget)
        server.flush_cache()
        replies = server.generate(prompts(), max_new_tokens=NEW_TOKENS)
        assert_same_tokens([r["output_ids"] for r in replies], wanted, prompts())
        _check_counts(replies, budget, len(prompts()), most=tree.get("width", 4) - 1)
        if shape == "self-chain" and budget != "0":
            # With auto this holds of every probe and after every pause.
            for reply in replies:
                meta = reply["meta_info"]
                assert meta["spec_num_correct_drafts"] == meta["spec_num_verify_drafts"]
    if shape == "self-tree":
        # The target's token is a node of every level, unless a less likely path
        # crowded it out of a narrow level: never for the first level.
        metas = [reply["meta_info"] for reply in replies]
        rounds = sum(meta["spec_verify_ct"] for meta in metas)
        correct = sum(meta["spec_num_correct_drafts"] for meta in metas)
        assert correct >= 1.5 * rounds


def _check_counts(replies: list[dict], budget: str, running: int, most: int) -> None:
    """The budget binds: per round no more drafts are verified than it affords."""
    verified = sum(r["meta_info"]["spec_num_verify_drafts"] for r in replies)
    rounds = max(r["meta_info"]["spec_verify_ct"] for r in replies)
    afford = most * running
    if budget.endswith("x"):
        afford = min(afford, int(budget[:-1]) * running)
    elif budget != "auto":
        afford = min(afford, int(budget))
    assert verified <= rounds * afford
    for reply in replies:
        meta = reply["meta_info"]
        assert (
            meta["spec_num_proposed_drafts"]
            >= meta["spec_num_verify_drafts"]
            >= meta["spec_num_correct_drafts"]
        )
        # Each round emits its correct drafts and one more token; the prompt's step one.
        emitted = meta["spec_num_correct_drafts"] + meta["spec_verify_ct"] + 1
        assert emitted == meta["completion_tokens"]
