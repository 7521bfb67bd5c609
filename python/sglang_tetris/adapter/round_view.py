"""One round's requests as plain host values: settings, limits, lengths, load."""

from dataclasses import dataclass
from typing import Any

from sglang_tetris.adapter.request_settings import (
    RequestSettings,
    draft_caps_host,
    settings_of,
)
from sglang_tetris.core.auto_policy import Load
from sglang_tetris.core.config import TetrisConfig
from sglang_tetris.core.round_cost import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundView:
    """Lists have one entry per request of the batch.

    caps       drafts that each may have verified in this round
    pool_rows  their rows of `req_to_token`
    seq_lens   committed tokens before the round
    """

    settings: list[RequestSettings]
    caps: list[int]
    pool_rows: list[int]
    seq_lens: list[int]
    load: Load


def view_of(
    batch: Any, config: TetrisConfig, *, high_first: bool, most: int
) -> RoundView:
    """Return the view of a decode batch; at most `most` drafts per request."""
    settings = [settings_of(req, config, high_first) for req in batch.reqs]
    caps = draft_caps_host(batch.reqs, settings, most)
    seq_lens = batch.seq_lens_cpu.tolist()
    return RoundView(
        settings=settings,
        caps=caps,
        pool_rows=batch.req_pool_indices_cpu.tolist(),
        seq_lens=seq_lens,
        load=Load(
            batch_size=len(caps),
            num_drafting=sum(own.limit != 0 for own in settings),
            total_kv_tokens=sum(seq_lens),
            sampling=_sampling(batch.sampling_info),
        ),
    )


def prompt_load_of(batch: Any) -> Load:
    """Return the load of a prompt step's batch; cached text counts as KV only."""
    return Load(
        batch_size=len(batch.reqs),
        num_drafting=len(batch.reqs),
        total_kv_tokens=sum(batch.seq_lens_cpu.tolist()),
    )


def _sampling(info: Any) -> Sampling:
    """The dearest kind of sampling that the batch needs.

    Greedy requests have a top-k of 1, and make a batch that draws a sorted one.
    """
    if info.is_all_greedy:
        return "greedy"
    filters = info.need_top_p_sampling, info.need_top_k_sampling
    return "sorted" if any(filters) or info.need_min_p_sampling else "multinomial"
