"""SGLang's own decoding on the plain-CPU device: plain, EAGLE, EAGLE3, STANDALONE.

These are what TETRIS is compared with. The device computes a token's logits with the
same bits however the token is computed, so every comparison is strict.
"""

import random
from pathlib import Path

import pytest
import torch

from tests.e2e import models
from tests.e2e.pool import PLAIN, ServerPool

NEW_TOKENS = 24
LENGTHS = (1, 5, 17, 40, 80, 33)


def prompts(seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 512) for _ in range(n)] for n in LENGTHS]


def stock_flags(
    algorithm: str, draft: Path, *, steps: int, topk: int, width: int
) -> tuple[str, ...]:
    return (
        *("--speculative-algorithm", algorithm),
        *("--speculative-draft-model-path", str(draft)),
        *("--speculative-num-steps", str(steps)),
        *("--speculative-eagle-topk", str(topk)),
        *("--speculative-num-draft-tokens", str(width)),
    )


# algorithm, draft, steps, topk, width, further flags
BASELINES = {
    "eagle-chain-paged": ("EAGLE", "eagle", 3, 1, 4, ("--page-size", "4")),
    "eagle-tree": ("EAGLE", "eagle", 3, 2, 6, ()),
    "eagle3-tree": ("EAGLE3", "eagle3", 3, 2, 6, ()),
    "standalone-chain": ("STANDALONE", "standalone", 2, 1, 3, ()),
    "standalone-tree": ("STANDALONE", "target", 3, 2, 8, ()),
}


def draft_path(kind: str, root: Path) -> Path:
    return {
        "eagle": models.make_eagle_draft,
        "eagle3": models.make_eagle3_draft,
        "standalone": models.make_standalone_draft,
        "target": models.make_target,
    }[kind](root)


@pytest.mark.parametrize("name", BASELINES)
def test_stock_speculation_gives_plain_decodings_tokens(
    pool: ServerPool, model_root: Path, name: str
) -> None:
    algorithm, draft, steps, topk, width, more = BASELINES[name]
    target = models.make_target(model_root)
    wanted = pool.plain(target, prompts(), max_new_tokens=NEW_TOKENS)
    flags = stock_flags(
        algorithm, draft_path(draft, model_root), steps=steps, topk=topk, width=width
    )
    server = pool.get(target, (*flags, *more))
    first = server.generate(prompts(), max_new_tokens=NEW_TOKENS)
    assert [reply["output_ids"] for reply in first] == wanted
    if draft in ("eagle", "target"):
        # These drafts are good enough that some of a round is always accepted.
        correct = sum(r["meta_info"]["spec_num_correct_drafts"] for r in first)
        assert correct >= 10

    # Again, from the prefix cache; a tree by token pairs keeps one token less.
    again = server.generate(prompts(), max_new_tokens=NEW_TOKENS)
    assert [reply["output_ids"] for reply in again] == wanted
    page = 4 if more else 1
    for length, reply in zip(LENGTHS, again, strict=True):
        keyed = length - 1 if algorithm == "STANDALONE" else max(length - 2, 0)
        assert reply["meta_info"]["cached_tokens"] == keyed // page * page


def test_stock_eagle_samples_at_temperature_one(
    pool: ServerPool, model_root: Path
) -> None:
    """Different answers to the same prompt, under every filter; the server lives."""
    target = models.make_target(model_root)
    algorithm, draft, steps, topk, width, more = BASELINES["eagle-tree"]
    flags = stock_flags(
        algorithm, draft_path(draft, model_root), steps=steps, topk=topk, width=width
    )
    server = pool.get(target, (*flags, *more))
    prompt = prompts()[2]
    for filters in ({}, {"top_p": 0.9}, {"top_k": 50}, {"top_k": 50, "top_p": 0.95}):
        replies = server.generate(
            [prompt] * 8, temperature=2.0, max_new_tokens=12, **filters
        )
        assert len({tuple(reply["output_ids"]) for reply in replies}) > 1
    greedy = server.generate([prompt], max_new_tokens=12)
    assert greedy[0]["output_ids"] == pool.plain(target, [prompt], max_new_tokens=12)[0]


def test_mixed_chunks_and_seeds_do_not_depend_on_the_batch(
    pool: ServerPool, model_root: Path
) -> None:
    """Chunked prefill mixed with decoding, and seeded sampling: alone as in a batch."""
    target = models.make_target(model_root)
    wanted = pool.plain(target, prompts(), max_new_tokens=NEW_TOKENS)
    server = pool.get(
        target,
        (
            *PLAIN,
            "--enable-deterministic-inference",
            "--enable-mixed-chunk",
            *("--chunked-prefill-size", "32"),
        ),
    )
    replies = server.generate(prompts(), max_new_tokens=NEW_TOKENS)
    assert [reply["output_ids"] for reply in replies] == wanted

    # All of them filtered: SGLang keys the noise by rank where any request of the
    # batch has a filter, and by token where none has.
    params = [
        {"temperature": 1.5, "sampling_seed": 7, "max_new_tokens": 12, "top_p": 0.99},
        {"temperature": 1.5, "sampling_seed": 8, "max_new_tokens": 12, "top_p": 0.9},
        {"temperature": 1.5, "sampling_seed": 9, "max_new_tokens": 12, "top_k": 20},
    ]
    batch = [prompts()[i] for i in (1, 2, 3)]
    body = {
        "input_ids": batch,
        "sampling_params": [p | {"ignore_eos": True} for p in params],
    }
    together = [reply["output_ids"] for reply in server.post("/generate", body)]
    for prompt, one, expected in zip(batch, params, together, strict=True):
        (reply,) = server.generate([prompt], **one)
        assert reply["output_ids"] == expected
    other_seed = server.generate([batch[0]], **params[0] | {"sampling_seed": 10})
    assert other_seed[0]["output_ids"] != together[0]


def test_a_sliding_window_model_against_transformers(
    pool: ServerPool, model_root: Path
) -> None:
    """A window shorter than the prompts, in prefill, in decoding and after a hit."""
    transformers = pytest.importorskip("transformers")
    path = models.make_sliding_window_target(model_root, window=16)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    batch = [prompts()[i] for i in (2, 3, 4)]
    wanted = []
    for prompt in batch:
        ids = list(prompt)
        for _ in range(12):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            ids.append(int(logits.argmax()))
        wanted.append(ids[len(prompt) :])
    server = pool.get(path, PLAIN)
    for _ in range(2):
        replies = server.generate(batch, max_new_tokens=12)
        assert [reply["output_ids"] for reply in replies] == wanted
