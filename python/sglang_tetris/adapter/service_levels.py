"""Requests that are behind their target latency: their drafts count more.

A request's latency is the mean time per token since its first round here. One that
needs r times its target has r times the weight, at most `_MOST`; one that keeps to it
has its own. Selection under weights stays exact (core.allocator).
"""

import time
from typing import Any

from sglang_tetris.adapter.rank_agreement import RankAgreement
from sglang_tetris.adapter.request_settings import RequestSettings

_ATTRIBUTE = "tetris_first_round"
_MOST = 8.0


class ServiceLevels:
    """The weights of a round's requests, by priority and lateness; rank 0's clock."""

    def __init__(self, agreement: RankAgreement) -> None:
        self._agreement = agreement

    def weights(
        self, reqs: list[Any], settings: list[RequestSettings]
    ) -> list[float] | None:
        """Return a weight per request, or None where all count alike."""
        weights = [own.weight for own in settings]
        if any(own.target_tpot_ms is not None for own in settings):
            now = time.perf_counter()
            late = [_lateness(*pair, now) for pair in zip(reqs, settings, strict=True)]
            late = self._agreement.reals(late)
            weights = [w * factor for w, factor in zip(weights, late, strict=True)]
        return None if len(set(weights)) <= 1 else weights


def _lateness(req: Any, own: RequestSettings, now: float) -> float:
    if own.target_tpot_ms is None:
        return 1.0
    began, tokens = vars(req).setdefault(_ATTRIBUTE, (now, len(req.output_ids)))
    emitted = len(req.output_ids) - tokens
    if emitted <= 0:
        return 1.0
    spent_ms = 1e3 * (now - began) / emitted
    return min(max(spent_ms / own.target_tpot_ms, 1.0), _MOST)
