"""Rejection's laws along a chain are plain decoding's, and what it emits has them."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

from sglang_tetris.adapter import rejection_sampling
from sglang_tetris.adapter.penalties import PenaltyState
from sglang_tetris.adapter.rejection_sampling import RejectionSampler, make_rejection
from sglang_tetris.adapter.sampled_chains import ChainSampler
from sglang_tetris.adapter.target_law import target_law
from sglang_tetris.core import (
    AcceptResult,
    VerifyPlan,
    build_verify_plan,
    select_draft_tokens,
)
from sglang_tetris.core.config import TetrisConfig
from tests.reference.chi_square import p_value
from tests.reference.forests import trees_of
from tests.unit.adapter.upstream_objects import (
    OVERFLOWS,
    STOP,
    VOCAB,
    PlainDecoding,
    info_of,
    overflow,
    regex,
    request,
    sampler,
)

DEPTH = 4
FALSE_ALARM = 1e-4
NUM_SAMPLES = 6000
PROCESSOR = DisallowedTokensLogitsProcessor.to_str()


def rejection(
    *,
    token_ids: torch.Tensor | None = None,
    vocab_size: int = VOCAB,
    seed: int = 0,
    block: bool = False,
    in_turn: bool = False,
) -> tuple[ChainSampler, RejectionSampler]:
    chains = ChainSampler(
        seed=seed, device="cpu", rule="max", token_ids=token_ids, vocab_size=vocab_size
    )
    penalties = PenaltyState(vocab_size, "cpu")
    return chains, RejectionSampler(
        chains, penalties, block=block, one_after_the_other=in_turn
    )


def plan_of(chains: list[list[int]], anchors: list[int], budget: int) -> VerifyPlan:
    """The plan of these chains; of the budget the first requests get most."""
    trees = trees_of(
        *(
            [(token, place - 1, 0.9) for place, token in enumerate(chain)]
            for chain in chains
        )
    )
    allocation = select_draft_tokens(trees, draft_budget=budget)
    return build_verify_plan(
        trees,
        allocation,
        anchors=torch.tensor(anchors),
        prefix_lens=torch.arange(7, 7 + len(chains)),
    )


def a_round(
    chains: ChainSampler,
    decide: RejectionSampler,
    draft_logits: torch.Tensor,
    logits: torch.Tensor,
    info,
    reqs: list,
) -> tuple[AcceptResult, torch.Tensor]:
    """Draw a chain for each of three requests, and judge all of it; with the drafts."""
    laws = [chains.law(draft_logits[:, j], info) for j in range(DEPTH)]
    tokens = torch.stack([chains.draw(law) for law in laws], 1)
    plan = plan_of(tokens.tolist(), [2, 2, 2], budget=12)
    laws_drawn, rows = torch.stack(laws, 1), logits.flatten(0, 1).clone()
    accepted, _ = decide.accept(plan, rows, info, reqs, laws_drawn, keep_logits=False)
    return accepted, tokens


def rows_of(plan: VerifyPlan, request: int) -> list[int]:
    return [row for row in plan.retrieve_index[request].tolist() if row >= 0]


def flat_laws(bs: int) -> torch.Tensor:
    """Draft laws that can have drawn anything."""
    return torch.full((bs, DEPTH, VOCAB), 1 / VOCAB)


@pytest.fixture
def laws_seen(monkeypatch) -> list[torch.Tensor]:
    """The target's laws, as they are given to the core."""
    seen: list[torch.Tensor] = []
    verify_chains = rejection_sampling.verify_chains

    def spy(plan, **arguments):
        seen.append(arguments["target_probs"].clone())
        return verify_chains(plan, **arguments)

    monkeypatch.setattr(rejection_sampling, "verify_chains", spy)
    return seen


# Requests of one batch: what each changes in its logits, and how it samples.
KINDS = {
    "plain": {"temperature": 0.9},
    "frequency": {"frequency_penalty": 1.5, "top_p": 0.9},
    "presence": {"presence_penalty": 2.0, "temperature": 1.3},
    "repetition": {"repetition_penalty": 1.7, "top_k": 8},
    "min_new_tokens": {"min_new_tokens": 4},
    "logit_bias": {"logit_bias": {"2": 3.0, "7": -4.0, "9": 1.0}},
    "grammar": {"pattern": "bbc([a-c][d-f])*"},
    "processor": {"processor": PROCESSOR, "custom_params": {"token_ids": [1, 5]}},
    "greedy": {"temperature": 0.0, "frequency_penalty": 2.0},
    "everything": {
        "pattern": "[a-h]*",
        "frequency_penalty": 0.8,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {"0": 1.5, str(STOP): -9.0},
        "temperature": 0.7,
        "min_p": 0.05,
    },
}
OUTPUT = (1, 1, 2)


def running(name: str):
    """The request of that name, three tokens after its prompt."""
    params = dict(KINDS[name])
    pattern = params.pop("pattern", None)
    grammar = None if pattern is None else regex(pattern)
    return request(name, OUTPUT, grammar=grammar, **params)


def drafts_of(stock, name: str, logits: torch.Tensor) -> tuple[list[int], list, list]:
    """Draft what plain decoding would emit; return tokens, its logits, its laws.

    The likeliest token and the second take turns, so that some tokens come again.
    """
    plain = PlainDecoding(stock, running(name))
    tokens, processed, laws = [], [], []
    for place, row in enumerate(logits):
        done, law = plain.step(row)
        processed.append(done)
        laws.append(law)
        if place < len(logits) - 1:
            # No text goes on after the stop token.
            best = law[:STOP].topk(2)
            token = int(best.indices[place % 2 if best.values[1] > 0 else 0])
            tokens.append(token)
            plain.emit(token)
    return tokens, processed, laws


@pytest.mark.parametrize("budget", [10 * DEPTH, 27])
def test_the_laws_along_a_chain_are_those_of_plain_decoding(
    budget: int, laws_seen: list[torch.Tensor]
) -> None:
    """Penalties count the drafts before, grammars follow them, trimmed or not."""
    names = list(KINDS)
    drawn = torch.Generator().manual_seed(3)
    # Tokens that are likely stay so: penalties find them again and again.
    usual = 2.0 * torch.randn(len(names), 1, VOCAB, generator=drawn)
    logits = usual + torch.randn(len(names), DEPTH + 1, VOCAB, generator=drawn)
    with sampler() as stock:
        wanted = [
            drafts_of(stock, name, rows)
            for name, rows in zip(names, logits, strict=True)
        ]
        reqs = [running(name) for name in names]
        plan = plan_of([found[0] for found in wanted], [OUTPUT[-1]] * 10, budget)
        flat = torch.cat(
            [logits[i, : len(rows_of(plan, i))] for i in range(len(names))]
        )
        kept = flat.clone()
        _, decide = rejection()
        decide.accept(
            plan, kept, info_of(reqs), reqs, flat_laws(len(reqs)), keep_logits=True
        )
        untouched = flat.clone()
        decide.accept(
            plan,
            untouched,
            info_of(reqs),
            reqs,
            flat_laws(len(reqs)),
            keep_logits=False,
        )
    assert torch.equal(untouched, flat)
    lens = plan.verify_lens.tolist()
    assert sum(lens) == len(names) + min(budget, 10 * DEPTH)
    for i, (name, (_, processed, laws)) in enumerate(zip(names, wanted, strict=True)):
        rows = rows_of(plan, i)
        for seen in laws_seen:
            torch.testing.assert_close(
                seen[rows],
                torch.stack(laws[: len(rows)]),
                atol=1e-6,
                rtol=1e-5,
                msg=f"{name}: {{}}".format,
            )
        torch.testing.assert_close(kept[rows], torch.stack(processed[: len(rows)]))
        # The scheduler advances the matchers itself.
        if reqs[i].grammar is not None:
            assert reqs[i].grammar.accepted_tokens == list(OUTPUT)


def test_a_draft_that_cannot_be_emitted_ends_its_chain(
    laws_seen: list[torch.Tensor],
) -> None:
    """The grammar would not take it, and what follows is never reached."""
    grammar = regex("bbcd[a-d]*")
    reqs = [request("a", OUTPUT, grammar=grammar, temperature=0.8), request("b")]
    # After "d" the "f" cannot be emitted.
    plan = plan_of([[3, 5, 0, 0], [5, 5, 5, 5]], [2, 2], budget=8)
    logits = torch.randn(10, VOCAB, generator=torch.Generator().manual_seed(0))
    with sampler():
        _, decide = rejection()
        accepted, ended = decide.accept(
            plan, logits, info_of(reqs), reqs, flat_laws(2), keep_logits=False
        )
    laws = laws_seen[0]
    first = rows_of(plan, 0)
    assert not laws[first[1], 5], "the grammar allows it after all"
    never = torch.zeros(VOCAB)
    never[0] = 1.0
    for row in first[2:]:
        assert torch.equal(laws[row], never)
    for row in rows_of(plan, 1):
        assert (laws[row] > 0).all(), "the other request goes on"
    assert ended == []
    assert accepted.accept_lens[0] <= 2
    assert grammar.accepted_tokens == list(OUTPUT)


def test_a_draft_that_ends_its_grammar_is_reported(
    laws_seen: list[torch.Tensor],
) -> None:
    grammar = regex("bbca?")
    reqs = [request("b"), request("a", OUTPUT, grammar=grammar)]
    plan = plan_of([[5, 5, 5, 5], [0, STOP, 4, 4]], [2, 2], budget=8)
    logits = torch.randn(10, VOCAB, generator=torch.Generator().manual_seed(0))
    with sampler():
        _, decide = rejection()
        _, ended = decide.accept(
            plan, logits, info_of(reqs), reqs, flat_laws(2), keep_logits=False
        )
    assert ended == [1]
    rows = rows_of(plan, 1)
    stop_only = torch.zeros(VOCAB)
    stop_only[STOP] = 1.0
    assert torch.equal(laws_seen[0][rows[1]], stop_only)
    assert not grammar.is_terminated()
    assert grammar.accepted_tokens == list(OUTPUT)


def test_matchers_are_put_back_when_a_round_fails(monkeypatch) -> None:
    grammar = regex("bbc[a-d]*")
    reqs = [request("a", OUTPUT, grammar=grammar)]
    plan = plan_of([[0, 1, 2, 0]], [2], budget=4)
    rows_done = []
    whole = rejection_sampling.target_law

    def fails_late(*args, **kwargs):
        rows_done.append(1)
        if len(rows_done) == 3:
            raise RuntimeError("planted")
        return whole(*args, **kwargs)

    monkeypatch.setattr(rejection_sampling, "target_law", fails_late)
    with sampler():
        _, decide = rejection()
        with pytest.raises(RuntimeError, match="planted"):
            decide.accept(
                plan,
                torch.zeros(5, VOCAB),
                info_of(reqs),
                reqs,
                flat_laws(1),
                keep_logits=False,
            )
    assert grammar.accepted_tokens == list(OUTPUT)


def test_greedy_rows_of_a_mixed_batch_are_plain_decodings_own_tokens() -> None:
    """Whatever is drawn for the others; with the draft right, and with it wrong."""
    params = [
        {"temperature": 0.0},
        {"temperature": 1.5},
        {"temperature": 0.0, "presence_penalty": 3.0},
    ]
    drawn = torch.Generator().manual_seed(1)
    usual = torch.randn(3, 1, VOCAB, generator=drawn)
    logits = usual + 0.3 * torch.randn(3, DEPTH + 1, VOCAB, generator=drawn)
    # The draft of request 0 is right twice, and then wrong.
    draft_logits = logits[:, :DEPTH].clone()
    draft_logits[0, 2, 11] = 50.0
    with sampler() as stock:
        reqs = [request(str(i), OUTPUT, **kind) for i, kind in enumerate(params)]
        info = info_of(reqs)
        wanted = {}
        for greedy in (0, 2):
            plain = PlainDecoding(stock, request("p", OUTPUT, **params[greedy]))
            wanted[greedy] = []
            for row in logits[greedy]:
                token = int(plain.step(row)[1].argmax())
                wanted[greedy].append(token)
                plain.emit(token)
        # Penalties make the second greedy request leave its likeliest token.
        assert len(set(wanted[2])) > 1
        emitted = {0: set(), 1: set(), 2: set()}
        for seed in range(40):
            chains, decide = rejection(seed=seed)
            accepted, _ = a_round(chains, decide, draft_logits, logits, info, reqs)
            for i, count in enumerate(accepted.accept_lens.tolist()):
                emitted[i].add(tuple(accepted.accept_tokens[i, :count].tolist()))
    assert emitted[0] == {tuple(wanted[0][:3])}
    found = emitted[2].pop()
    assert not emitted[2]
    assert found == tuple(wanted[2][: len(found)])
    assert len(emitted[1]) > 10, "the sampled request draws"


def test_flashinfers_order_of_filters_holds_at_every_row(
    laws_seen: list[torch.Tensor],
) -> None:
    """Its filters leave fewer tokens than torch's, which act together."""
    logits = torch.randn(DEPTH + 1, VOCAB, generator=torch.Generator().manual_seed(0))
    reqs = [request("a", top_k=6, top_p=0.7, min_p=0.02)]
    # The likeliest tokens are never left out, so that every row is reached.
    plan = plan_of([logits[:DEPTH].argmax(1).tolist()], [2], budget=DEPTH)
    with sampler():
        info = info_of(reqs)
        wanted = []
        for in_turn in (True, False):
            _, decide = rejection(in_turn=in_turn)
            decide.accept(
                plan, logits.clone(), info, reqs, flat_laws(1), keep_logits=False
            )
            rows = [
                target_law(row[None], info, one_after_the_other=in_turn)
                for row in logits
            ]
            wanted.append(torch.cat(rows))
    assert torch.equal(laws_seen[0], wanted[0])
    assert torch.equal(laws_seen[1], wanted[1])
    assert not torch.equal(wanted[0], wanted[1]), "nothing to tell apart here"


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("spoilt", OVERFLOWS)
def test_a_draft_that_overflowed_still_has_a_law(
    spoilt: str, temperature: float
) -> None:
    """Its tokens are as good as any; without a law none can be judged."""
    with sampler():
        info = info_of([request(temperature=temperature), request(temperature=0.0)])
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    overflow(logits[0], spoilt)
    chains, _ = rejection()
    law = chains.law(logits, info)
    assert (law >= 0).all()
    torch.testing.assert_close(law.sum(1), torch.ones(2))


@pytest.mark.parametrize("backend", ["pytorch", "flashinfer"])
@pytest.mark.parametrize("block", [False, True])
def test_it_is_made_as_the_server_is_configured(
    backend: str, block: bool, monkeypatch
) -> None:
    given = []
    verify_chains = rejection_sampling.verify_chains

    def spy_verify(plan, **arguments):
        given.append((arguments["block"], arguments["draft_token_ids"]))
        return verify_chains(plan, **arguments)

    def spy_law(logits, info, *, one_after_the_other):
        given.append(one_after_the_other)
        return target_law(logits, info, one_after_the_other=one_after_the_other)

    monkeypatch.setattr(rejection_sampling, "verify_chains", spy_verify)
    monkeypatch.setattr(rejection_sampling, "target_law", spy_law)
    runner = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCAB))
    worker = SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=runner, random_seed=5),
        device="cpu",
        hot_token_id=HOT,
    )
    config = TetrisConfig(block_verification=block, value_rule="square")
    reqs = [request()]
    plan = plan_of([[9, 2]], [2], budget=2)
    with sampler(), get_exec().kernel.override(sampling_backend=backend):
        decide = make_rejection(config, worker, PenaltyState(VOCAB, "cpu"))
        laws = torch.full((1, DEPTH, len(HOT)), 1 / len(HOT))
        decide.accept(
            plan, torch.zeros(3, VOCAB), info_of(reqs), reqs, laws, keep_logits=False
        )
    *in_turn, (found_block, ids) = given
    assert set(in_turn) == {backend == "flashinfer"}
    assert found_block is block
    assert ids is HOT
    # The draft worker draws from the same generator; every rank has this one's seed.
    drawn_from = worker.sampler
    assert drawn_from.law_size == len(HOT)
    again = ChainSampler(
        seed=5, device="cpu", rule="square", token_ids=HOT, vocab_size=VOCAB
    )
    again.uniforms(1, DEPTH)
    again.uniforms(1)
    assert torch.equal(drawn_from.uniforms(4), again.uniforms(4))
    sharp = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    halved = 0.5 * sharp + 0.5 * laws[:, 0]
    values = drawn_from.chains([torch.tensor([9])], [halved]).accept_probs
    torch.testing.assert_close(values, halved.square().sum(1, keepdim=True))


HOT = torch.tensor([9, 2, 14, 5])


def test_hot_tokens_are_accepted_as_the_targets_ids() -> None:
    """Draft and target have one law, over the tokens that the draft knows."""
    drawn = torch.Generator().manual_seed(2)
    hot_logits = torch.randn(3, DEPTH + 1, len(HOT), generator=drawn)
    logits = torch.full((3, DEPTH + 1, VOCAB), -torch.inf)
    logits[:, :, HOT] = hot_logits
    with sampler():
        reqs = [request(str(i), temperature=t) for i, t in enumerate((0.6, 1.0, 1.8))]
        info = info_of(reqs)
        seen = set()
        for seed in range(30):
            chains, decide = rejection(token_ids=HOT, seed=seed)
            assert chains.law_size == len(HOT)
            accepted, tokens = a_round(chains, decide, hot_logits, logits, info, reqs)
            assert accepted.accept_lens.tolist() == [DEPTH + 1] * 3
            assert torch.equal(accepted.accept_tokens[:, :DEPTH], tokens)
            seen |= set(accepted.accept_tokens.flatten().tolist())
    assert seen == set(HOT.tolist())


SMALL = 8
SMALL_HOT = torch.tensor([6, 0, 3, 7, 1])
ANCHOR = 2
# The second token's law depends on the first, and on having emitted it.
PARAMS = {"temperature": 0.8, "frequency_penalty": 0.9, "logit_bias": {"4": 0.7}}


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
@pytest.mark.parametrize("token_ids", [None, SMALL_HOT], ids=["all", "hot tokens"])
def test_two_tokens_follow_the_law_of_plain_decoding(
    token_ids: torch.Tensor | None, block: bool
) -> None:
    """Pearson's chi-square on NUM_SAMPLES pairs; wrong once in 1 / FALSE_ALARM runs.

    The target's next logits depend on the last token, those of the draft are others.
    """
    drawn = torch.Generator().manual_seed(4)
    table = torch.randn(SMALL, SMALL, generator=drawn)
    known = torch.arange(SMALL) if token_ids is None else token_ids
    draft_table = table[:, known] + torch.randn(SMALL, len(known), generator=drawn)
    output = (ANCHOR,)
    reqs = [request("a", output, **PARAMS)] * NUM_SAMPLES
    with sampler() as stock:
        law = torch.zeros(SMALL, SMALL)
        for first in range(SMALL):
            plain = PlainDecoding(stock, request("p", output, **PARAMS), SMALL)
            begins = plain.step(table[ANCHOR])[1]
            plain.emit(first)
            law[first] = begins[first] * plain.step(table[first])[1]
        info = info_of(reqs[:1], SMALL)
        info = dataclasses.replace(
            info,
            **{
                name: getattr(info, name).repeat_interleave(NUM_SAMPLES, 0)
                for name in ("temperatures", "top_ps", "top_ks", "min_ps", "logit_bias")
            },
        )

        def pairs(biased: bool) -> tuple[torch.Tensor, float]:
            chains, decide = rejection(
                token_ids=token_ids, vocab_size=SMALL, block=block
            )
            decide.plant_bias(biased)
            anchors = torch.full((NUM_SAMPLES,), ANCHOR)
            first_law = chains.law(draft_table[anchors], info)
            first = chains.draw(first_law)
            second_law = chains.law(draft_table[first], info)
            drafts = torch.stack([first, chains.draw(second_law)], 1)
            plan = plan_of(drafts.tolist(), anchors.tolist(), budget=2 * NUM_SAMPLES)
            accepted, _ = decide.accept(
                plan,
                table[plan.input_ids],
                info,
                reqs,
                torch.stack([first_law, second_law], 1),
                keep_logits=False,
            )
            tokens, lens = accepted.accept_tokens[:, :2].clone(), accepted.accept_lens
            # What the next round would emit, where this one ended after a token.
            after = law[tokens[:, 0]]
            more = torch.multinomial(after, 1, generator=drawn)[:, 0]
            tokens[:, 1] = torch.where(lens == 1, more, tokens[:, 1])
            cells = tokens[:, 0] * SMALL + tokens[:, 1]
            counts = torch.bincount(cells, minlength=SMALL * SMALL).double()
            return counts, float((lens > 1).double().mean())

        counts, correct = pairs(biased=False)
        assert 0.3 < correct < 0.95, "right often, wrong often"
        assert p_value(counts, law.flatten()) > FALSE_ALARM
        counts, _ = pairs(biased=True)
        assert p_value(counts, law.flatten()) < FALSE_ALARM, "a planted bias is missed"
