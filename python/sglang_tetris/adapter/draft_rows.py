"""Parts of a batch for the draft: some of its requests, their state, their trees."""

import copy
from typing import Any

import torch
from sglang.srt.speculative.eagle_info import EagleDraftInput

from sglang_tetris.core import DraftTrees


def no_drafts(bs: int, device: str) -> DraftTrees:
    """Return trees without a node, for a step in which nothing could be verified."""
    empty = torch.empty((bs, 0), dtype=torch.int64, device=device)
    return DraftTrees(
        tokens=empty,
        parents=empty.clone(),
        accept_probs=torch.empty((bs, 0), device=device),
        num_nodes=torch.zeros(bs, dtype=torch.int64, device=device),
        max_depth=0,
    )


def blank_state(bonus_tokens: torch.Tensor, topk: int) -> EagleDraftInput:
    """Return a state in which no request's level 0 is known."""
    bs, device = bonus_tokens.shape[0], bonus_tokens.device
    return EagleDraftInput(
        topk_p=torch.zeros(bs, topk, device=device),
        topk_index=torch.zeros(bs, topk, dtype=torch.int64, device=device),
        bonus_tokens=bonus_tokens,
    )


def put_rows(state: EagleDraftInput, rows: list[int], part: EagleDraftInput) -> None:
    """Write the part's level 0 into these rows of a state, in place."""
    state.topk_p[rows] = part.topk_p
    state.topk_index[rows] = part.topk_index
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
    state = batch.spec_info
    part.spec_info = EagleDraftInput(
        topk_p=state.topk_p[index],
        topk_index=state.topk_index[index],
        hidden_states=None
        if state.hidden_states is None
        else state.hidden_states[index],
        bonus_tokens=state.bonus_tokens[index],
    )
    return part


def spread_trees(trees: DraftTrees, rows: list[int], bs: int) -> DraftTrees:
    """Return the trees of `rows` as trees of the whole batch, the others empty."""
    at = torch.tensor(rows, device=trees.tokens.device)

    def spread(part: torch.Tensor) -> torch.Tensor:
        whole = part.new_zeros((bs, *part.shape[1:]))
        whole[at] = part
        return whole

    return DraftTrees(
        tokens=spread(trees.tokens),
        parents=spread(trees.parents),
        accept_probs=spread(trees.accept_probs),
        num_nodes=spread(trees.num_nodes),
        max_depth=trees.max_depth,
    )
