"""A real model with its trained drafts: the same tokens, and drafts that are worth it.

The full matrix is `make exactness`; here 8 prompts x 32 tokens at three budgets.
"""

from pathlib import Path

import pytest

from tests.e2e.pool import (
    PLAIN,
    ServerPool,
    assert_same_tokens,
    set_budget,
    tetris_flags,
    tetris_info,
)

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that reverses a string.",
    "What is 17 + 25? Explain each step.",
    "Tell me a short story about a cat who finds a key.",
    "List three uses of copper.",
    "Translate 'good morning' into Spanish.",
    "Explain in one sentence why the sky is blue.",
    "Write a haiku about rain.",
)
NEW_TOKENS = 32


@pytest.fixture(scope="module")
def real():
    from sglang_tetris.tools.prepare_model import default_cache_dir, prepare

    return prepare(default_cache_dir())


@pytest.fixture(scope="module")
def asked(real) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real.target)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for question in QUESTIONS
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


@pytest.mark.parametrize("kind", ["eagle", "standalone"])
def test_real_drafts_give_plain_decodings_tokens(
    pool: ServerPool, real, asked: list[list[int]], kind: str
) -> None:
    wanted = pool.plain(real.target, asked, max_new_tokens=NEW_TOKENS)
    draft: Path = getattr(real, kind)
    flags = tetris_flags(draft, steps=3, topk=2, width=8)
    server = pool.get(
        real.target, (*flags, "--speculative-token-map", str(real.hot_tokens))
    )
    for budget in ("0", "3x", "1000"):
        set_budget(server, budget)
        server.flush_cache()
        before = tetris_info(server)["totals"]
        replies = server.generate(asked, max_new_tokens=NEW_TOKENS)
        plain = pool.get(real.target, PLAIN)
        got = [reply["output_ids"] for reply in replies]
        assert_same_tokens(got, wanted, asked, plain)
        after = tetris_info(server)["totals"]
    rounds = after["num_rounds"] - before["num_rounds"]
    correct = after["num_correct_drafts"] - before["num_correct_drafts"]
    assert correct / rounds > 0.5, "the trained draft is hardly ever right"
