"""Parts of a batch for the draft: some of its requests, their state, their trees."""

import copy
from typing import Any

import torch
from sglang.srt.speculative.eagle_info import EagleDraftInput

from sglang_tetris.adapter.sampling import info_of_rows
from sglang_tetris.core import DraftTrees


def blank_state(
    bonus_tokens: torch.Tensor, topk: int, law_size: int = 0
) -> EagleDraftInput:
    """Return a state in which no request's level 0 is known.

    law_size: tokens of the laws that the state carries, 0 = none.
    """
    bs, device = bonus_tokens.shape[0], bonus_tokens.device
    return EagleDraftInput(
        topk_p=torch.zeros(bs, topk, device=device),
        topk_index=torch.zeros(bs, topk, dtype=torch.int64, device=device),
        draft_probs=torch.zeros(bs, law_size, device=device) if law_size else None,
        bonus_tokens=bonus_tokens,
    )


def put_rows(state: EagleDraftInput, rows: list[int], part: EagleDraftInput) -> None:
    """Write the part's level 0 into these rows of a state, in place."""
    state.topk_p[rows] = part.topk_p
    state.topk_index[rows] = part.topk_index
    if part.draft_probs is not None:
        state.draft_probs[rows] = part.draft_probs
    if part.hidden_states is None:
        return
    if state.hidden_states is None:
        shape = (state.topk_p.shape[0], *part.hidden_states.shape[1:])
        state.hidden_states = part.hidden_states.new_zeros(shape)
    state.hidden_states[rows] = part.hidden_states


def rows_of(batch: Any, rows: list[int]) -> Any:
    """Return a shallow copy of the batch with only these requests, for one forward."""
    part = copy.copy(batch)
    index = torch.tensor(rows, device=batch.seq_lens.device)
    part.reqs = [batch.reqs[row] for row in rows]
    part.seq_lens = batch.seq_lens[index]
    part.seq_lens_cpu = batch.seq_lens_cpu[rows]
    part.seq_lens_sum = int(part.seq_lens_cpu.sum())
    part.req_pool_indices = batch.req_pool_indices[index]
    part.req_pool_indices_cpu = batch.req_pool_indices_cpu[rows]
    if batch.orig_seq_lens is not None:
        part.orig_seq_lens = batch.orig_seq_lens[index]
    if batch.multimodal_inputs is not None:
        part.multimodal_inputs = [batch.multimodal_inputs[row] for row in rows]
    part.sampling_info = info_of_rows(batch.sampling_info, index)
    state, laws = batch.spec_info, batch.spec_info.draft_probs
    part.spec_info = EagleDraftInput(
        topk_p=state.topk_p[index],
        topk_index=state.topk_index[index],
        draft_probs=None if laws is None else laws[index],
        hidden_states=None
        if state.hidden_states is None
        else state.hidden_states[index],
        bonus_tokens=state.bonus_tokens[index],
    )
    return part


def spread_trees(trees: DraftTrees, rows: list[int], bs: int) -> DraftTrees:
    """Return the trees of `rows` as trees of the whole batch, the others empty."""

    def whole(part: torch.Tensor) -> torch.Tensor:
        return spread(part, rows, bs)

    return DraftTrees(
        tokens=whole(trees.tokens),
        parents=whole(trees.parents),
        accept_probs=whole(trees.accept_probs),
        num_nodes=whole(trees.num_nodes),
        max_depth=trees.max_depth,
    )


def spread(part: torch.Tensor, rows: list[int], bs: int) -> torch.Tensor:
    """Return a tensor of the whole batch that holds `part` in these rows, else 0."""
    whole = part.new_zeros((bs, *part.shape[1:]))
    whole[torch.tensor(rows, device=part.device)] = part
    return whole


def entries_of(
    rows: list[int], first: list[int], lens: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and the entry of each token, lens[r] tokens of rows[r]."""
    at = torch.tensor(rows)
    if len(lens) == sum(lens) and all(lens):  # one each: a round without drafts
        return at, torch.tensor(first)
    device = at.device
    return at.repeat_interleave(torch.tensor(lens)), ragged(first, lens, device)


def ragged(first: list[int], lens: list[int], device: torch.device) -> torch.Tensor:
    """`[first[0], first[0] + 1, ..., first[1], ...]`, lens[r] numbers each."""
    begins = torch.tensor(first, device=device)
    counts = torch.tensor(lens, device=device)
    starts = counts.cumsum(0) - counts
    total = torch.arange(sum(lens), device=device)
    return total + (begins - starts).repeat_interleave(counts)
