"""The law at a row is the one that SGLang's own sampler draws from."""

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_tetris.adapter.target_law import target_law
from tests.reference.chi_square import p_value
from tests.unit.adapter.upstream_objects import (
    OVERFLOWS,
    VOCAB,
    info_of,
    overflow,
    request,
    sampler,
    stock_law,
)

NUM_DRAWS = 4000
FALSE_ALARM = 1e-4

ALL_KINDS = {
    "temperature": [{"temperature": t} for t in (0.3, 1.0, 2.5)],
    "top_k": [{"top_k": k} for k in (2, 5, 16, 100)],
    "top_p": [{"top_p": p} for p in (0.05, 0.5, 0.9)],
    "min_p": [{"min_p": p} for p in (0.02, 0.2, 0.9)],
    "all filters in each row": [
        {"temperature": 0.8, "top_k": 9, "top_p": 0.7, "min_p": 0.1},
        {"temperature": 1.6, "top_k": 4, "top_p": 0.95, "min_p": 0.3},
        {"temperature": 1.2, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
    ],
    "another in each row": [
        {"temperature": 0.7},
        {"top_k": 3},
        {"temperature": 0.0},
        {"top_p": 0.6, "temperature": 1.4},
        {"min_p": 0.15},
    ],
    "greedy beside plain": [{"temperature": 0.0}, {}, {"temperature": 0.0}],
    "greedy alone": [{"temperature": 0.0}],
}


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randn(rows, VOCAB, generator=drawn)


@pytest.mark.parametrize("kinds", ALL_KINDS.values(), ids=list(ALL_KINDS))
def test_it_is_the_law_that_sglangs_sampler_reports(kinds: list[dict]) -> None:
    with sampler() as stock:
        info = info_of([request(**kind) for kind in kinds])
        for seed in range(20):
            logits = logits_of(len(kinds), seed)
            found = target_law(logits, info, one_after_the_other=False)
            wanted = stock_law(stock, logits, info)
            torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
            # A token more or less would be a small difference, of small tokens.
            assert torch.equal(found > 0, wanted > 0)


def test_masked_tokens_have_no_chance() -> None:
    """Grammars mask by -inf, whatever the temperature and the filters."""
    with sampler() as stock:
        kinds = ALL_KINDS["another in each row"]
        info = info_of([request(**kind) for kind in kinds])
        logits = logits_of(len(kinds))
        logits[:, ::2] = -torch.inf
        found = target_law(logits, info, one_after_the_other=False)
        assert not found[:, ::2].any()
        wanted = stock_law(stock, logits, info)
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def test_a_greedy_row_is_one_hot_at_its_arg_max() -> None:
    with sampler():
        info = info_of([request(temperature=0.0), request(top_p=0.9)])
    logits = logits_of(2)
    law = target_law(logits, info, one_after_the_other=False)
    one_hot = torch.zeros(VOCAB)
    one_hot[logits[0].argmax()] = 1.0
    assert torch.equal(law[0], one_hot)
    assert (law[1] > 0).sum() > 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("spoilt", OVERFLOWS)
def test_logits_that_overflowed_still_make_a_law(
    spoilt: str, temperature: float
) -> None:
    """Whatever it is: the round that they spoil is not the only one of its batch."""
    with sampler():
        info = info_of([request(temperature=temperature), request(temperature=0.0)])
    logits = logits_of(2)
    overflow(logits[0], spoilt)
    law = target_law(logits, info, one_after_the_other=False)
    assert (law >= 0).all()
    torch.testing.assert_close(law.sum(1), torch.ones(2))


@pytest.mark.parametrize("kind", ["another in each row", "all filters in each row"])
def test_the_tokens_of_sglangs_sampler_follow_it(kind: str) -> None:
    """Pearson's chi-square, NUM_DRAWS per row; wrong once in 1 / FALSE_ALARM rows.

    The law of a slightly different temperature must be found out by the same test.
    """
    kinds = ALL_KINDS[kind]
    logits = logits_of(len(kinds), seed=5)
    with sampler() as stock:
        info = info_of([request(**kind) for kind in kinds])
        law = target_law(logits, info, one_after_the_other=False)
        info.temperatures *= 1.2
        biased = target_law(logits, info, one_after_the_other=False)
        # The same rows again and again, in one batch.
        many = info_of([request(**kind) for kind in kinds] * NUM_DRAWS)
        torch.manual_seed(0)
        output = LogitsProcessorOutput(next_token_logits=logits.repeat(NUM_DRAWS, 1))
        positions = torch.zeros(NUM_DRAWS * len(kinds), dtype=torch.int64)
        tokens = stock(output, many, False, [], [], positions).view(NUM_DRAWS, -1)
    counts = [
        torch.bincount(tokens[:, row].long(), minlength=VOCAB).double()
        for row in range(len(kinds))
    ]
    for row, seen in enumerate(counts):
        assert p_value(seen, law[row]) > FALSE_ALARM, kinds[row]
    found = [p_value(counts[row], biased[row]) for row in range(len(kinds))]
    assert min(found) < FALSE_ALARM, "the bias is missed"


def in_turn(probs: list[float], top_k: int, top_p: float, min_p: float) -> list[float]:
    """Top-k, top-p and min-p one after the other, renormalised in between."""

    def renormalised(kept: list[int]) -> dict[int, float]:
        total = sum(left[token] for token in kept)
        return {token: left[token] / total for token in kept}

    left = dict(enumerate(probs))
    order = sorted(left, key=lambda token: -left[token])
    left = renormalised(order[:top_k])
    kept, before = [], 0.0
    for token in order[:top_k]:
        if before <= top_p:
            kept.append(token)
        before += left[token]
    left = renormalised(kept)
    highest = left[kept[0]]
    left = renormalised([token for token in kept if left[token] >= highest * min_p])
    return [left.get(token, 0.0) for token in range(len(probs))]


def test_flashinfers_filters_follow_each_other_where_there_is_a_min_p() -> None:
    kinds = [
        {"top_k": 6, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 4, "top_p": 0.6, "min_p": 0.0},
        {"temperature": 0.0},
    ]
    logits = logits_of(3, seed=2) / 2
    with sampler():
        info = info_of([request(**kind) for kind in kinds])
        found = target_law(logits, info, one_after_the_other=True)
        together = target_law(logits, info, one_after_the_other=False)
        no_min_p = info_of([request(top_k=4, top_p=0.6), request(), request(top_k=1)])
    probs = logits.softmax(-1).tolist()
    wanted = [
        in_turn(row, kind.get("top_k", 1), kind.get("top_p", 1.0), kind.get("min_p", 0))
        for row, kind in zip(probs, kinds, strict=True)
    ]
    torch.testing.assert_close(found, torch.tensor(wanted))
    assert not torch.equal(found > 0, together > 0), "nothing to tell apart here"
    # Without a min-p FlashInfer applies top-k and top-p together, as torch does.
    assert torch.equal(
        target_law(logits, no_min_p, one_after_the_other=True),
        target_law(logits, no_min_p, one_after_the_other=False),
    )
