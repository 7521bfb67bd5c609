"""Counters: what is shown per request adds up to what is shown per server."""

import pytest

from sglang_tetris.core import DraftCounters, count_round


def test_a_round_counts_neither_anchors_nor_bonus_tokens():
    first, bare = count_round(num_nodes=[7, 0], verify_lens=[5, 1], accept_lens=[3, 1])
    assert first == DraftCounters(
        num_rounds=1, num_proposed_drafts=7, num_verify_drafts=4, num_correct_drafts=2
    )
    assert bare == DraftCounters(num_rounds=1)
    assert first.num_trimmed_drafts == 3
    assert first.num_accept_tokens == first.accept_length == 3
    assert first.accept_rate == 0.5
    assert (bare.accept_length, bare.accept_rate) == (1.0, 0.0)


def test_before_the_first_round():
    assert (DraftCounters().accept_length, DraftCounters().accept_rate) == (0.0, 0.0)


def test_sums_agree_whichever_way_they_are_taken():
    rounds = [
        count_round(num_nodes=[4, 6], verify_lens=[3, 7], accept_lens=[2, 1]),
        count_round(num_nodes=[5, 2], verify_lens=[1, 3], accept_lens=[1, 3]),
    ]
    per_request = [sum(column, DraftCounters()) for column in zip(*rounds, strict=True)]
    server = sum(per_request, DraftCounters())
    assert server == sum([c for step in rounds for c in step], DraftCounters())
    assert server.num_rounds == 4
    assert server.num_verify_drafts == 2 + 6 + 0 + 2
    assert server.num_correct_drafts == 1 + 0 + 0 + 2
    assert server.accept_rate == 3 / 10
    assert server.accept_length == 7 / 4
    assert server.num_trimmed_drafts == 17 - 10


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"num_rounds": -1}, "num_rounds .* -1"),
        ({"num_correct_drafts": 1}, "num_verify_drafts must be at least 1, got 0"),
        ({"num_verify_drafts": 2}, "num_proposed_drafts must be at least 2, got 0"),
    ],
)
def test_counts_that_cannot_be(counts, message):
    with pytest.raises(ValueError, match=message):
        DraftCounters(**counts)


def test_lengths_that_do_not_agree():
    with pytest.raises(ValueError, match="got 1, 2 and 1"):
        count_round(num_nodes=[1], verify_lens=[1, 1], accept_lens=[1])
