"""Unseeded at temperature 1, the joint law of three tokens is the target's own.

The exact law comes from the target's weights through transformers: 64 tokens, three
positions. The draft is the target with noise on its weights, so that drafts are often
right and often wrong (q != p), and the budget binds: about half of the drafts are
trimmed. A fourth token is generated and ignored, so that two drafts are of use when the
second token is chosen. NUM_SAMPLES answers are compared with the exact law by Pearson's
chi-square over all cells with an expected count of at least 5, the others taken
together; the test is wrong once in 1 / FALSE_ALARM runs. A planted bias (the target's
arg-max kept at verified rows) must be found by the same test.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e import models
from tests.e2e.pool import ServerPool, set_budget, tetris_flags
from tests.e2e.servers import Server
from tests.reference.chi_square import p_value

PROMPT = [5, 9, 33, 12]
NUM_SAMPLES = 6000
FALSE_ALARM = 1e-4
TEST_SWITCH = {"SGLANG_TETRIS_TEST_SWITCHES": "1"}


@pytest.fixture(scope="module")
def law_models(model_root: Path) -> tuple[Path, Path]:
    """The target, its logits flattened to a few likely tokens, and a noisy copy."""
    sharp = models.make_target(model_root, models.LAW_SHAPE)
    weights = load_file(sharp / "model.safetensors")
    weights["lm_head.weight"] *= 0.25
    target = _copy(sharp, model_root / "law-target", weights)
    generator = torch.Generator().manual_seed(11)
    noisy = {
        name: value + 0.08 * value.std() * torch.randn(value.shape, generator=generator)
        if value.dim() > 1
        else value
        for name, value in weights.items()
    }
    return target, _copy(sharp, model_root / "law-draft", noisy)


def _copy(source: Path, path: Path, weights: dict[str, torch.Tensor]) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(source, path)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def exact_joint(target: Path) -> torch.Tensor:
    """Return P(t1, t2, t3 | PROMPT), [64, 64, 64] float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    vocab = models.LAW_SHAPE.vocab_size

    def next_law(contexts: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = model(contexts).logits[:, -1]
        return logits.double().softmax(-1)

    joint = next_law(torch.tensor([PROMPT]))
    contexts = torch.tensor([PROMPT])
    for _ in range(2):
        grown = contexts.repeat_interleave(vocab, 0)
        last = torch.arange(vocab).repeat(len(contexts))[:, None]
        contexts = torch.cat([grown, last], 1)
        joint = joint.flatten()[:, None] * next_law(contexts)
    return joint.view(vocab, vocab, vocab)


def _sample(server: Server) -> torch.Tensor:
    """Return how often each triple was answered, [64, 64, 64]."""
    counts = torch.zeros(64, 64, 64, dtype=torch.float64)
    for _ in range(NUM_SAMPLES // 500):
        replies = server.generate([PROMPT] * 500, temperature=1.0, max_new_tokens=4)
        triples = torch.tensor([reply["output_ids"][:3] for reply in replies])
        counts.index_put_(
            tuple(triples.T), torch.ones(500, dtype=torch.float64), accumulate=True
        )
    return counts


def _p_value(counts: torch.Tensor, law: torch.Tensor) -> float:
    likely = law * counts.sum() >= 5
    assert likely.sum() >= 20, "too few cells to tell anything"
    return p_value(counts.flatten(), law.flatten())


REJECTION = ("--tetris-verify", "rejection")
BLOCK = (
    *REJECTION,
    *("--tetris-config", '{"block_verification": true, "value_rule": "square"}'),
)


@pytest.mark.parametrize(
    ("topk", "verify"),
    [(1, ()), (2, ()), (1, REJECTION), (1, BLOCK)],
    ids=["chain", "tree", "rejection", "block"],
)
def test_three_tokens_follow_the_targets_joint_law(
    pool: ServerPool, law_models: tuple[Path, Path], topk: int, verify: tuple[str, ...]
) -> None:
    target, draft = law_models
    law = exact_joint(target)
    flags = (*tetris_flags(draft, steps=2, topk=topk), *verify)
    server = pool.get(target, flags, env=TEST_SWITCH)
    set_budget(server, "1x")
    _switch(server, False)
    before = _totals(server)
    counts = _sample(server)
    after = _totals(server)
    verified = after["num_verify_drafts"] - before["num_verify_drafts"]
    correct = after["num_correct_drafts"] - before["num_correct_drafts"]
    trimmed = after["num_trimmed_drafts"] - before["num_trimmed_drafts"]
    assert trimmed > 0.2 * verified, "the budget must bind"
    assert 0.2 * verified < correct < 0.9 * verified, "right often, wrong often"
    assert _p_value(counts, law) > FALSE_ALARM
    if verify:  # its budget may then follow from earlier rounds only
        set_budget(server, "auto")
        assert _p_value(_sample(server), law) > FALSE_ALARM
        assert _totals(server)["num_verify_drafts"] > after["num_verify_drafts"]
        set_budget(server, "1x")

    _switch(server, True)
    try:
        assert _p_value(_sample(server), law) < FALSE_ALARM, "a planted bias is missed"
    finally:
        _switch(server, False)


def test_min_p_acts_at_every_row(
    pool: ServerPool, law_models: tuple[Path, Path]
) -> None:
    """min-p cannot be seeded, so it is checked by its law, renormalised per token."""
    target, draft = law_models
    law = exact_joint(target)
    kept = law.sum((1, 2))
    kept = torch.where(kept >= 0.2 * kept.max(), kept, 0.0)
    second = law.sum(2) / law.sum((1, 2))[:, None]
    second = torch.where(second >= 0.2 * second.max(1, keepdim=True).values, second, 0)
    third = law / law.sum(2, keepdim=True)
    third = torch.where(third >= 0.2 * third.max(2, keepdim=True).values, third, 0)
    wanted = (
        (kept / kept.sum())[:, None, None]
        * (second / second.sum(1, keepdim=True))[:, :, None]
        * (third / third.sum(2, keepdim=True))
    )
    server = pool.get(target, tetris_flags(draft, steps=2, topk=2), env=TEST_SWITCH)
    set_budget(server, "1x")
    counts = torch.zeros(64, 64, 64, dtype=torch.float64)
    for _ in range(4):
        replies = server.generate(
            [PROMPT] * 500, temperature=1.0, min_p=0.2, max_new_tokens=4
        )
        for reply in replies:
            counts[tuple(reply["output_ids"][:3])] += 1
    assert counts[wanted == 0].sum() == 0, "a token below min-p was emitted"
    assert _p_value(counts, wanted) > FALSE_ALARM


def _totals(server: Server) -> dict:
    return server.server_info()["internal_states"][0]["tetris"]["totals"]


def _switch(server: Server, on: bool) -> None:
    server.post(
        "/set_internal_state", {"server_args": {"tetris_test_keep_argmax": int(on)}}
    )
