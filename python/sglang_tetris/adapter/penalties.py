"""Penalties that count every emitted token, at every verified row.

At a row the state is the request's committed output plus the tokens accepted so far in
this round:

    logit -= frequency_penalty * count + presence_penalty * [count > 0]
    logit  = logit / repetition_penalty (or * where negative)    where count > 0
    logit of a stop token = -inf     while fewer than min_new_tokens are out

Stock SGLang's speculative path feeds its penalisers one token per round. Counts live on
the device, one row per request that needs them; a row is rebuilt from the request's own
output whenever the two disagree, so retraction and re-prefill lose nothing.

The formulas, their order and min_new_tokens' stop set are those of SGLang's
sampling/penaltylib, with the additive ones before the multiplicative one.
"""

from typing import Any

import torch


def uses_penalties(req: Any) -> bool:
    """Whether the request's logits depend on what it has emitted."""
    params = req.sampling_params
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens
    )


class PenaltyState:
    """Committed token counts of the penalised requests that are running."""

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._counts: dict[str, tuple[int, torch.Tensor]] = {}

    def begin(self, reqs: list[Any]) -> "RoundPenalties | None":
        """Return the penalties of a round over `reqs`, None if no request has any."""
        if not any(uses_penalties(req) for req in reqs):
            self._counts.clear()
            return None
        running = {req.rid for req in reqs}
        for rid in [rid for rid in self._counts if rid not in running]:
            del self._counts[rid]
        counts = torch.zeros(len(reqs), self.vocab_size, device=self.device)
        for row, req in enumerate(reqs):
            if uses_penalties(req):
                counts[row] = self._committed(req)
        return RoundPenalties(reqs, counts)

    def _committed(self, req: Any) -> torch.Tensor:
        seen, counts = self._counts.get(req.rid, (0, None))
        output = list(req.output_ids)
        if counts is None or seen > len(output):
            seen, counts = 0, torch.zeros(self.vocab_size, device=self.device)
        new = torch.tensor(output[seen:], dtype=torch.int64, device=self.device)
        counts.scatter_add_(0, new, torch.ones(len(new), device=self.device))
        self._counts[req.rid] = (len(output), counts)
        return counts


class RoundPenalties:
    """The penalties along the followed paths of one round, `[bs, vocab]`."""

    def __init__(self, reqs: list[Any], counts: torch.Tensor) -> None:
        self._counts = counts
        device = counts.device

        def column(name: str) -> torch.Tensor:
            values = [getattr(req.sampling_params, name) for req in reqs]
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        self._frequency = column("frequency_penalty")
        self._presence = column("presence_penalty")
        self._repetition = column("repetition_penalty")
        self._min_new = column("min_new_tokens")
        emitted = [len(req.output_ids) for req in reqs]
        self._emitted = torch.tensor(emitted, dtype=torch.float32, device=device)[
            :, None
        ]
        self._stops = [
            (row, token)
            for row, req in enumerate(reqs)
            if req.sampling_params.min_new_tokens
            for token in _stop_tokens(req)
            if token < counts.shape[1]
        ]

    def at(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (additive, scaling or None) `[rows, vocab]` for these requests."""
        counts = self._counts[rows]
        seen = counts > 0
        additive = -(self._frequency[rows] * counts + self._presence[rows] * seen)
        if self._stops:
            held = (self._emitted < self._min_new)[rows, 0]
            where = {int(row): place for place, row in enumerate(rows.tolist())}
            for row, token in self._stops:
                place = where.get(row)
                if place is not None and bool(held[place]):
                    additive[place, token] = -torch.inf
        if bool((self._repetition == 1.0).all()):
            return additive, None
        return additive, torch.where(seen, self._repetition[rows], 1.0)

    def emit(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count one more token for each of these requests."""
        self._counts[rows, tokens] += 1.0
        self._emitted[rows] += 1.0


def _stop_tokens(req: Any) -> set[int]:
    """The tokens that min_new_tokens holds back, as SGLang's penaliser has them."""
    tokenizer = req.tokenizer
    tokens = set(req.sampling_params.stop_token_ids or ())
    tokens |= set(req.eos_token_ids or ())
    if tokenizer is not None:
        tokens |= set(tokenizer.additional_stop_token_ids or ())
        tokens.add(tokenizer.eos_token_id)
    tokens.discard(None)
    return tokens
