"""SGLang's sampling parameters act at every verified row.

The draft is the target itself, so rounds emit several tokens: what stock SGLang's
speculative path forgets (tokens inside a round) would show.
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
from tests.e2e.test_exactness_tiny import TREE, prompts

pytestmark = pytest.mark.server("self-tree")

DETERMINISTIC = ("--enable-deterministic-inference",)

GREEDY_PARAMS = {
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 2.0},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": {"7": 40.0, "9": -60.0}},
    "min-new-tokens": {"min_new_tokens": 12, "stop_token_ids": list(range(60, 160))},
}


@pytest.mark.parametrize("name", GREEDY_PARAMS)
def test_penalties_and_bias_count_every_token(
    pool: ServerPool, model_root: Path, name: str
) -> None:
    params = {"max_new_tokens": 24, "ignore_eos": name != "min-new-tokens"}
    params |= GREEDY_PARAMS[name]
    target = models.make_target(model_root)
    wanted = pool.plain(target, prompts(6), **params)
    assert wanted != pool.plain(target, prompts(6), max_new_tokens=24), "no effect"
    server = pool.get(target, tetris_flags(target, **TREE))
    for budget in ("5", "1000"):
        set_budget(server, budget)
        replies = server.generate(prompts(6), **params)
        assert_same_tokens([r["output_ids"] for r in replies], wanted, prompts(6))
    drafts = sum(r["meta_info"]["spec_num_correct_drafts"] for r in replies)
    assert drafts > 0, "rounds of one token would prove nothing"


def test_seeded_answers_are_plain_decodings_alone_and_in_a_batch(
    pool: ServerPool, model_root: Path
) -> None:
    target = models.make_target(model_root)
    asked = (prompts() * 4)[:32]
    params = [
        {
            "temperature": 0.8,
            "top_p": 0.95,
            "sampling_seed": 100 + i,
            "max_new_tokens": 24,
            "ignore_eos": True,
        }
        | ({"top_k": 40} if i % 2 else {})
        for i in range(len(asked))
    ]
    plain = pool.get(target, (*PLAIN, *DETERMINISTIC))
    wanted = _ask(plain, asked, params)
    assert len({tuple(ids) for ids in wanted}) > 24, "seeds must matter"
    server = pool.get(target, (*tetris_flags(target, **TREE), *DETERMINISTIC))
    for budget in ("7", "1000"):
        set_budget(server, budget)
        assert_same_tokens(_ask(server, asked, params), wanted, asked)
    for i in (0, 1, 9, 30):
        (alone,) = _ask(server, asked[i : i + 1], params[i : i + 1])
        assert alone == wanted[i]


def test_a_seed_with_min_p_is_a_400_and_the_server_lives(
    pool: ServerPool, model_root: Path
) -> None:
    target = models.make_target(model_root)
    server = pool.get(target, (*tetris_flags(target, **TREE), *DETERMINISTIC))
    with pytest.raises(RuntimeError, match=r": 400 .*min_p"):
        server.generate(prompts(1), temperature=1.0, min_p=0.1, sampling_seed=1)
    assert server.generate(prompts(1), max_new_tokens=2)


def _ask(server, asked: list[list[int]], params: list[dict]) -> list[list[int]]:
    body = {"input_ids": asked, "sampling_params": params}
    return [reply["output_ids"] for reply in server.post("/generate", body)]
