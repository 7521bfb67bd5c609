"""What a round leaves behind in the target's KV and in the log-probabilities."""

from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs

from sglang_tetris.core import AcceptResult, VerifyPlan


def commit_kv(
    pool: Any, plan: VerifyPlan, slots: torch.Tensor, accepted: AcceptResult
) -> None:
    """Move the followed path's KV to the slots right after the committed tokens."""
    if plan.input_ids.shape[0] == accepted.accept_lens.shape[0]:
        return  # anchors alone, which are in place
    on_path = accepted.accept_index >= 0
    rows = accepted.accept_index[on_path].to(torch.int64)
    depth = torch.arange(on_path.shape[1], device=rows.device)
    front = (plan.qo_indptr[:-1, None] + depth)[on_path].to(torch.int64)
    moved = front != rows
    if bool(moved.any()):
        pool.move_kv_cache(slots[front[moved]], slots[rows[moved]])


def add_logprobs(
    batch: Any, target: Any, plan: VerifyPlan, accepted: AcceptResult
) -> None:
    """Compute the log-probabilities of the emitted tokens into the target's output."""
    emitted = torch.zeros_like(plan.input_ids)
    on_path = accepted.accept_index >= 0
    rows = accepted.accept_index[on_path].to(torch.int64)
    emitted[rows] = accepted.accept_tokens[on_path]
    compute_spec_logprobs(batch, target, emitted, accept_index=accepted.accept_index)
