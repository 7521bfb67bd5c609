"""A real model with its trained drafts: the same tokens, and drafts that are worth it.

The full matrix is `make exactness`; here 8 prompts x 32 tokens at three budgets.
"""

import json
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


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "maximum": 999},
    },
    "required": ["city", "people"],
}


def test_structured_output_is_plain_decodings(
    pool: ServerPool, real, asked: list[list[int]]
) -> None:
    """Grammar masks act at every row; a trimmed node leaves no matcher advanced."""
    params = [
        {"max_new_tokens": 40, "temperature": 0.0}
        | ({"json_schema": json.dumps(SCHEMA)} if i % 2 else {})
        for i in range(4)
    ]
    body = {"input_ids": asked[:4], "sampling_params": params}
    wanted = pool.get(real.target, PLAIN).post("/generate", body)
    server = pool.get(real.target, _flags(real, real.eagle))
    for budget in ("0", "3", "1000"):
        set_budget(server, budget)
        replies = server.post("/generate", body)
        for reply, oracle in zip(replies, wanted, strict=True):
            assert reply["text"] == oracle["text"]
        for reply in replies[1::2]:
            assert set(json.loads(reply["text"])) == {"city", "people"}


def _flags(real, draft: Path) -> tuple[str, ...]:
    flags = tetris_flags(draft, steps=3, topk=2, width=8)
    return (*flags, "--speculative-token-map", str(real.hot_tokens))


@pytest.mark.parametrize("kind", ["eagle", "standalone"])
def test_real_drafts_give_plain_decodings_tokens(
    pool: ServerPool, real, asked: list[list[int]], kind: str
) -> None:
    wanted = pool.plain(real.target, asked, max_new_tokens=NEW_TOKENS)
    server = pool.get(real.target, _flags(real, getattr(real, kind)))
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
