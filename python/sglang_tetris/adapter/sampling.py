"""`match` verification: the target's own token at each row of the followed path.

At a row SGLang's own `Sampler` chooses the token exactly as plain decoding would at
that position: same logits after penalties, grammar, bias; same temperature, top-k,
top-p, min-p; with a seed the same noise, which SGLang keys by (seed, position,
token). The child that holds the token is followed; where there is none it is the bonus
token. So
nothing about the draft, the trimming or the budget can change the output law.

Rows off the path are never sampled: the anchors first, then the rows they lead to, at
most depth + 1 calls of at most bs rows. A batch that is greedy and has no penalties, no
grammar and no processor takes one arg-max over all rows instead.
"""

import dataclasses
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo

from sglang_tetris.adapter.penalties import PenaltyState, RoundPenalties
from sglang_tetris.adapter.undrafted import accept_anchors
from sglang_tetris.core import AcceptResult, VerifyPlan, match_tree

_PER_REQUEST = (
    "temperatures",
    "top_ps",
    "top_ks",
    "min_ps",
    "sampling_seed",
    "logit_bias",
)


class MatchSampler:
    """Chooses the emitted tokens of a verified batch.

    sampler is the target runner's `Sampler`; keep_logits makes `accept` leave the
    processed logits of the path's rows in place, for log-probabilities.
    """

    def __init__(self, sampler: Any, penalties: PenaltyState) -> None:
        self._sampler = sampler
        self._penalties = penalties
        self._keep_argmax = False

    def plant_argmax(self, on: Any) -> None:
        """Emit the arg-max at sampled rows: a bias that tests must be able to find."""
        self._keep_argmax = bool(on)

    def accept(
        self,
        plan: VerifyPlan,
        logits: torch.Tensor,
        info: SamplingBatchInfo,
        reqs: list[Any],
        *,
        keep_logits: bool,
    ) -> tuple[AcceptResult, list[int]]:
        """Return the path each request follows and the tokens it emits.

        Beside it the requests whose grammar ended before their path did.

        logits  [T, vocab], the target's at the plan's rows; with keep_logits the rows
        on the path are replaced by what was sampled from.
        """
        penalties = self._penalties.begin(reqs)
        grammars = grammars_of(reqs)
        simple = info.is_all_greedy and penalties is None and grammars is None
        if simple and not info.has_custom_logit_processor:
            if info.logit_bias is not None:
                lens = plan.verify_lens.to(torch.int64)
                logits += info.logit_bias.repeat_interleave(lens, 0)
            match = match_tree if plan.max_depth else accept_anchors
            return match(plan, logits.argmax(-1)), []
        walk = _Walk(plan)
        try:
            while walk.rows.numel():
                self._level(walk, plan, logits, info, penalties, grammars, keep_logits)
        finally:
            roll_back(grammars, walk.advanced)
        return walk.result(), walk.ended

    def _level(
        self,
        walk: "_Walk",
        plan: VerifyPlan,
        logits: torch.Tensor,
        info: SamplingBatchInfo,
        penalties: RoundPenalties | None,
        grammars: list[Any] | None,
        keep_logits: bool,
    ) -> None:
        """Sample one row of each request still on its way down, and step down."""
        level, rows = processed_rows(
            logits, walk.rows, walk.requests, info, penalties, grammars
        )
        if keep_logits:
            logits[walk.rows] = rows
        positions = plan.positions[walk.rows]
        if self._keep_argmax:
            tokens = rows.argmax(-1)
        else:
            output = LogitsProcessorOutput(next_token_logits=rows)
            tokens = self._sampler(output, level, False, [], [], positions)
        tokens = tokens.to(torch.int64)
        if penalties is not None:
            penalties.emit(walk.requests, tokens)
        walk.step(tokens, grammars)


class _Walk:
    """Where each request stands on its way down its tree.

    requests [n] int64, those still walking; rows [n] int64, the flat row each is at.
    """

    def __init__(self, plan: VerifyPlan) -> None:
        self._plan = plan
        bs, device = plan.batch_size, plan.input_ids.device
        self.requests = torch.arange(bs, device=device)
        self.rows = plan.retrieve_index[:, 0].clone()
        self._places = torch.zeros(bs, dtype=torch.int64, device=device)
        width = plan.max_depth + 1
        self._tokens = torch.full((bs, width), -1, dtype=torch.int64, device=device)
        self._rows = torch.full((bs, width), -1, dtype=torch.int32, device=device)
        self._depth = 0
        # How often each request's grammar was advanced, to be undone.
        self.advanced = [0] * bs
        self.ended: list[int] = []

    def step(self, tokens: torch.Tensor, grammars: list[Any] | None) -> None:
        """Emit one token per walking request and go on with those that have a child."""
        self._tokens[self.requests, self._depth] = tokens
        self._rows[self.requests, self._depth] = self.rows.to(torch.int32)
        child = self._child(tokens)
        if grammars is not None:
            child = self._advance_grammars(child, tokens, grammars)
        on = child >= 0
        self.requests, self._places = self.requests[on], child[on]
        self.rows = self._plan.retrieve_index[self.requests, self._places]
        self._depth += 1

    def result(self) -> AcceptResult:
        return AcceptResult(
            accept_index=self._rows,
            accept_lens=(self._rows >= 0).sum(1, dtype=torch.int32),
            accept_tokens=self._tokens,
        )

    def _child(self, tokens: torch.Tensor) -> torch.Tensor:
        """Place of the child holding the token, -1 where there is none, `[n]`."""
        plan = self._plan
        place = plan.retrieve_next_token[self.requests, self._places]
        found = torch.full_like(place, -1)
        while bool((place >= 0).any()):
            row = plan.retrieve_index[self.requests, place.clamp(min=0)]
            holds = (place >= 0) & (plan.input_ids[row.clamp(min=0)] == tokens)
            # The first match wins: of equal siblings the lower node is followed.
            found = torch.where(holds & (found < 0), place, found)
            place = torch.where(
                place >= 0,
                plan.retrieve_next_sibling[self.requests, place.clamp(min=0)],
                -1,
            )
        return found

    def _advance_grammars(
        self, child: torch.Tensor, tokens: torch.Tensor, grammars: list[Any]
    ) -> torch.Tensor:
        """Move the matchers of requests that go on; stop where a grammar has ended."""
        child = child.clone()
        chosen = tokens.tolist()
        for place, request in enumerate(self.requests.tolist()):
            grammar = grammars[request]
            if grammar is None or child[place] < 0:
                continue
            grammar.accept_token(chosen[place])
            self.advanced[request] += 1
            if grammar.is_terminated():
                child[place] = -1
                self.ended.append(request)
        return child


def processed_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    requests: torch.Tensor,
    info: SamplingBatchInfo,
    penalties: RoundPenalties | None,
    grammars: list[Any] | None,
) -> tuple[SamplingBatchInfo, torch.Tensor]:
    """Return what SGLang's sampler takes for some rows, one of each request.

    That is their sampling parameters, and a copy of their logits `[rows, vocab]` with
    penalties, grammar mask and bias applied.
    """
    level = info_of_rows(info, requests)
    if penalties is not None:
        additive, scaling = penalties.at(requests)
        level.acc_additive_penalties, level.acc_scaling_penalties = additive, scaling
    if grammars is not None:
        level.grammars = [grammars[request] for request in requests.tolist()]
        if any(grammar is not None for grammar in level.grammars):
            level.update_regex_vocab_mask()
    chosen = logits[rows]
    level.apply_logits_bias(chosen)
    return level, chosen


def info_of_rows(info: SamplingBatchInfo, requests: torch.Tensor) -> SamplingBatchInfo:
    """Return the sampling parameters of these requests, one row each, without state.

    Penalties, grammars and the penaliser are left out for the caller to set.
    """
    rows = {
        name: None if getattr(info, name) is None else getattr(info, name)[requests]
        for name in _PER_REQUEST
    }
    entries, params = None, None
    if info.has_custom_logit_processor:
        order = requests.tolist()
        place_of = {request: place for place, request in enumerate(order)}
        entries = {}
        for key, entry in info.custom_logit_processor.items():
            places = [place_of[row] for row in entry.rows if row in place_of]
            if places:
                entries[key] = ProcessorEntry(
                    processor=entry.processor,
                    rows=places,
                    indices=torch.tensor(places, device=requests.device),
                )
        params = [info.custom_params[request] for request in order]
    return dataclasses.replace(
        info,
        **rows,
        grammars=None,
        grammar_mask=None,
        penalizer_orchestrator=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        has_custom_logit_processor=bool(entries),
        custom_logit_processor=entries or None,
        custom_params=params,
        sampling_mask_batch_indices=None,
        sampling_support_logprobs_capture_indices=None,
        return_sampling_masks=None,
    )


def grammars_of(reqs: list[Any]) -> list[Any] | None:
    grammars = [req.grammar for req in reqs]
    return grammars if any(grammar is not None for grammar in grammars) else None


def roll_back(grammars: list[Any] | None, advanced: list[int]) -> None:
    """Undo the matchers' moves: the scheduler advances them over what was emitted."""
    for request, moves in enumerate(advanced):
        if moves:
            grammars[request].rollback(moves)
