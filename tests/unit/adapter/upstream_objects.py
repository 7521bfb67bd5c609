"""SGLang's own requests, sampling parameters, grammars and sampler, on a CPU.

What plain decoding does with them is the reference for what the adapter does.
"""

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler, apply_custom_logit_processor
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo, VocabType

VOCAB = 16
STOP = 15
# Token 0 is "a", 1 is "b", ...: what a grammar is written in; the last one stops.
LETTERS = "abcdefghijklmnop"
# Logits that no law follows from as they are.
OVERFLOWS = ("one NaN", "all NaN", "one inf", "all -inf")


def overflow(row: torch.Tensor, how: str) -> None:
    """Put one of `OVERFLOWS` into a row of logits."""
    which, value = how.split()
    row[4 if which == "one" else slice(None)] = float(value)


@contextmanager
def sampler() -> Iterator[Sampler]:
    """SGLang's torch sampler, in a process that has no server."""
    settings = {
        "sampling_backend": "pytorch",
        "sampling_mask_max_tokens": VOCAB,
        "enable_custom_logit_processor": True,
    }
    with get_context().override_server_args(**settings):
        with get_parallel().override(tp_group=SimpleNamespace(device_group=None)):
            yield Sampler()


def request(
    rid: str = "r",
    output: tuple[int, ...] = (),
    *,
    grammar: BaseGrammarObject | None = None,
    processor: str | None = None,
    priority: int | None = None,
    **params: object,
) -> Req:
    """A running request that has emitted `output`; params as a user gives them."""
    req = Req(
        rid,
        "",
        array("q", [1, 2]),
        SamplingParams(**params),
        custom_logit_processor=processor,
        eos_token_ids={STOP},
        priority=priority,
        vocab_size=VOCAB,
        # With it the sampler says what it drew from.
        return_sampling_mask=True,
        sampling_logprobs_mode="support",
    )
    req.tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=STOP)
    req.output_ids.extend(output)
    req.grammar = grammar
    for token in output:
        if grammar is not None:
            grammar.accept_token(token)
    return req


def regex(pattern: str) -> XGrammarGrammar:
    """A grammar over the letters; it ends with the stop token."""
    known = TokenizerInfo(list(LETTERS), VocabType.RAW, stop_token_ids=[STOP])
    compiled = GrammarCompiler(known).compile_regex(pattern)
    matcher = GrammarMatcher(compiled, max_rollback_tokens=20)
    return XGrammarGrammar(matcher, VOCAB, compiled, None, pattern)


class _Batch:
    """What SGLang's sampling parameters read of a batch; kept by a weak reference."""

    device = "cpu"

    def __init__(self, reqs: list[Req]) -> None:
        self.reqs = reqs


def info_of(reqs: list[Req], vocab_size: int = VOCAB) -> SamplingBatchInfo:
    """The sampling parameters of a batch as the scheduler would make them."""
    batch = _Batch(reqs)
    info = SamplingBatchInfo.from_schedule_batch(batch, vocab_size)
    info.batch_kept_alive = batch
    return info


def stock_law(
    sampler: Sampler, logits: torch.Tensor, info: SamplingBatchInfo
) -> torch.Tensor:
    """The law `[rows, vocab]` that the sampler says its tokens were drawn from."""
    output = LogitsProcessorOutput(next_token_logits=logits.clone())
    positions = torch.zeros(len(logits), dtype=torch.int64)
    sampler(output, info, False, [], [], positions)
    found = output.sampling_mask_output
    probs = found.support_logprobs.exp()
    law = torch.zeros(len(logits), logits.shape[1])
    return law.scatter_(1, found.token_ids.long()[:, : probs.shape[1]], probs)


class PlainDecoding:
    """One request, alone, decoded plainly: SGLang's own code, a token at a time."""

    def __init__(self, sampler: Sampler, req: Req, vocab_size: int = VOCAB) -> None:
        self._sampler = sampler
        self._info = info_of([req], vocab_size)
        self._grammar = req.grammar
        for token in req.output_ids:
            self._info.penalizer_orchestrator.cumulate_output_tokens(
                torch.tensor([token])
            )

    def step(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the processed logits and the law of the next token, each `[vocab]`."""
        info, logits = self._info, logits[None].clone()
        info.grammars = [self._grammar] if self._grammar else None
        info.update_regex_vocab_mask()
        info.update_penalties()
        # What is accumulated is applied once: as for a forward of the scheduler.
        forward = info.copy_for_forward()
        # The mask is taken; with grammars the sampler would talk to other ranks.
        forward.grammars = None
        forward.apply_logits_bias(logits)
        law = stock_law(self._sampler, logits, forward)
        if forward.has_custom_logit_processor:
            apply_custom_logit_processor(logits, forward)
        return logits[0], law[0]

    def emit(self, token: int) -> None:
        """Emit the token of the last step."""
        self._info.penalizer_orchestrator.cumulate_output_tokens(torch.tensor([token]))
        if self._grammar is not None:
            self._grammar.accept_token(token)
