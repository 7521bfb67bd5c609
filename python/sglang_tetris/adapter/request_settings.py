"""What TETRIS needs to know of a request that does not change while it runs."""

from dataclasses import dataclass
from typing import Any

from sglang_tetris.adapter.penalties import uses_penalties
from sglang_tetris.core.config import TetrisConfig, parse_request
from sglang_tetris.core.sampling_classes import sampling_class

_ATTRIBUTE = "tetris_settings"
# More than so many steps of priority make no further difference.
_MOST_PRIORITY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings:
    """limit: its drafts per round that users set, or None; weight: their worth.

    target_tpot_ms: milliseconds per token that it is to keep to, or None.
    sampling_class: which requests' drafts are accepted by the same law.
    """

    limit: int | None
    weight: float
    target_tpot_ms: float | None
    sampling_class: int


def settings_of(req: Any, config: TetrisConfig, high_first: bool) -> RequestSettings:
    """Return a request's settings, worked out once; they live on SGLang's `Req`.

    high_first: whether larger priorities come first, as SGLang schedules them.
    """
    known = vars(req).get(_ATTRIBUTE)
    if known is None:
        known = _settings(req, config, high_first)
        setattr(req, _ATTRIBUTE, known)
    return known


def _settings(req: Any, config: TetrisConfig, high_first: bool) -> RequestSettings:
    params = req.sampling_params
    own = parse_request(params.custom_params)
    target_tpot_ms = own.target_tpot_ms or config.target_tpot_ms
    priority = req.priority or 0
    steps = max(-_MOST_PRIORITY, min(_MOST_PRIORITY, priority))
    return RequestSettings(
        limit=config.request_max_drafts(own.max_drafts),
        target_tpot_ms=target_tpot_ms,
        weight=config.priority_weight ** (steps if high_first else -steps),
        sampling_class=sampling_class(
            # SGLang writes greedy as top_k 1.
            0.0 if params.top_k == 1 else params.temperature,
            transformed=bool(
                uses_penalties(req)
                or params.logit_bias
                or req.grammar is not None
                or req.custom_logit_processor
            ),
        ),
    )


def draft_caps_host(
    reqs: list[Any], settings: list[RequestSettings], most: int
) -> list[int]:
    """Return how many drafts each request can use this round, at most `most`.

    A request that may emit m more tokens can use m - 1 drafts: the bonus token is one
    of them. What one request cannot use goes to the others.
    """
    caps = []
    for req, own in zip(reqs, settings, strict=True):
        left = req.sampling_params.max_new_tokens
        cap = most if left is None else min(most, left - len(req.output_ids) - 1)
        caps.append(max(0, cap if own.limit is None else min(cap, own.limit)))
    return caps
