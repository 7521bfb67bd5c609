"""Penalties at every row equal SGLang's own penalisers fed one token at a time."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="the adapter needs SGLang")

from sglang.srt.sampling import penaltylib

from sglang_tetris.adapter.penalties import PenaltyState

VOCAB = 16


def _req(rid: str, output=(), **params) -> SimpleNamespace:
    defaults = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "stop_token_ids": None,
    }
    return SimpleNamespace(
        rid=rid,
        output_ids=list(output),
        eos_token_ids={3},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=3),
        sampling_params=SimpleNamespace(**defaults | params),
    )


REQUESTS = [
    {"frequency_penalty": 0.5, "presence_penalty": 0.25},
    {},
    {"repetition_penalty": 1.5},
    {"min_new_tokens": 3, "stop_token_ids": {5}},
    {"frequency_penalty": -1.0, "repetition_penalty": 0.5},
]


class _Batch:
    """What SGLang's orchestrator reads of a batch; it keeps a weak reference."""

    device = "cpu"

    def __init__(self, reqs) -> None:
        self.reqs = reqs


def _stock(reqs, tokens: list[list[int]]):
    """SGLang's orchestrator after `tokens`, one list per step, one token a request."""
    batch = _Batch(reqs)
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(
        vocab_size=VOCAB,
        batch=batch,
        penalizers={
            penaltylib.BatchedFrequencyPenalizer,
            penaltylib.BatchedMinNewTokensPenalizer,
            penaltylib.BatchedPresencePenalizer,
            penaltylib.BatchedRepetitionPenalizer,
        },
    )
    for step in tokens:
        orchestrator.cumulate_output_tokens(torch.tensor(step))
    additive = torch.zeros(len(reqs), VOCAB)
    orchestrator.accumulate_additive_penalties(additive)
    return additive, orchestrator.accumulate_scaling_penalties()


def test_rows_along_a_path_equal_one_token_at_a_time() -> None:
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(0, 6, (6, len(REQUESTS)), generator=generator).tolist()
    committed, path = steps[:3], steps[3:]
    reqs = [
        _req(str(i), [step[i] for step in committed], **params)
        for i, params in enumerate(REQUESTS)
    ]
    round_ = PenaltyState(VOCAB, "cpu").begin(reqs)
    rows = torch.arange(len(reqs))
    for done in range(len(path) + 1):
        additive, scaling = round_.at(rows)
        want_additive, want_scaling = _stock(reqs, committed + path[:done])
        torch.testing.assert_close(additive, want_additive)
        torch.testing.assert_close(scaling, want_scaling)
        if done < len(path):
            round_.emit(rows, torch.tensor(path[done]))


def test_a_subset_of_rows_is_that_subset() -> None:
    reqs = [_req(str(i), [1, 2, 1], **params) for i, params in enumerate(REQUESTS)]
    state = PenaltyState(VOCAB, "cpu")
    whole = state.begin(reqs).at(torch.arange(len(reqs)))
    some = state.begin(reqs).at(torch.tensor([3, 0]))
    torch.testing.assert_close(some[0], whole[0][[3, 0]])
    torch.testing.assert_close(some[1], whole[1][[3, 0]])


def test_counts_follow_the_output_over_rounds_and_after_retraction() -> None:
    state = PenaltyState(VOCAB, "cpu")
    req = _req("a", [7], frequency_penalty=1.0)
    row = torch.tensor([0])
    assert state.begin([req]).at(row)[0][0, 7] == -1.0
    req.output_ids += [7, 8]
    assert state.begin([req]).at(row)[0][0, [7, 8]].tolist() == [-2.0, -1.0]
    state.begin([_req("b", [1], frequency_penalty=1.0)])  # "a" is not running
    assert state.begin([req]).at(row)[0][0, [7, 8]].tolist() == [-2.0, -1.0]


def test_a_round_does_not_leak_into_the_committed_counts() -> None:
    state = PenaltyState(VOCAB, "cpu")
    req = _req("a", [7], frequency_penalty=1.0)
    row = torch.tensor([0])
    state.begin([req]).emit(row, torch.tensor([9]))
    assert state.begin([req]).at(row)[0][0, 9] == 0.0


def test_nothing_is_computed_where_nobody_asks() -> None:
    assert PenaltyState(VOCAB, "cpu").begin([_req("a", [1])]) is None
