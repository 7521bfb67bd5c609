"""What one attention call reads: the layout shared by every forward mode.

A *group* is a set of query rows over one request's keys. Its keys are

* a **prefix**: positions ``0 .. prefix_lens[g] - 1`` of a row of ``req_to_token``,
  seen by every row of the group, and
* a **tail**: the slots ``tail_slots[tail_indptr[g]:tail_indptr[g + 1]]``, of which a
  row sees what the mask says.

Without a mask row ``i`` of a group of ``n`` rows and ``t`` tail slots sees the tail
slots ``0 .. t - n + i`` (causal). With one, ``mask`` is flat and boolean, row-major
``rows x tail`` per group, the groups one after another: for a group whose tail is its
own rows that is SGLang's QLEN_ONLY layout.

=====================  ===========================  ==============================
forward                prefix                       tail
=====================  ===========================  ==============================
decode                 all but the new token        the new token
extend, draft extend   cached tokens                the new tokens, causal
target verify          committed tokens             the verify rows, tree mask
draft decode, step s   committed tokens             s + 1 slots of every branch,
                                                    a row sees its own branch
=====================  ===========================  ==============================

``prefix_starts`` (None: 0) hides the prefix positions below it from every row of a
group: a draft's cache may hold nothing there.

Rows are ordered by group. ``row_positions`` and ``tail_positions`` are sequence
positions; only a sliding window reads them: a row sees a key when
``key position >= row position - window``.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """One forward's groups; all tensors are contiguous, on the CPU, int64.

    ``mask`` is bool or None. ``mask_indptr`` is None exactly when ``mask`` is.
    """

    req_rows: torch.Tensor
    prefix_lens: torch.Tensor
    row_indptr: torch.Tensor
    tail_indptr: torch.Tensor
    tail_slots: torch.Tensor
    row_positions: torch.Tensor
    tail_positions: torch.Tensor
    mask: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None
    prefix_starts: torch.Tensor | None = None

    @property
    def num_groups(self) -> int:
        return self.req_rows.shape[0]

    @property
    def num_rows(self) -> int:
        return self.row_positions.shape[0]


def decode_plan(
    *, req_rows: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor
) -> AttentionPlan:
    """One new token per request; ``seq_lens`` counts it, ``slots`` holds it."""
    num_groups = req_rows.shape[0]
    prefix_lens = seq_lens.to(torch.int64) - 1
    indptr = torch.arange(num_groups + 1)
    return AttentionPlan(
        req_rows=_int64(req_rows),
        prefix_lens=prefix_lens,
        row_indptr=indptr,
        tail_indptr=indptr,
        tail_slots=_int64(slots),
        row_positions=prefix_lens,
        tail_positions=prefix_lens,
    )


def extend_plan(
    *,
    req_rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    slots: torch.Tensor,
    prefix_starts: torch.Tensor | None = None,
) -> AttentionPlan:
    """``extend_lens[r]`` new tokens per request, causal, at ``slots``."""
    prefix_lens = _int64(prefix_lens)
    indptr = _indptr(_int64(extend_lens))
    positions = _ragged_arange(indptr, prefix_lens)
    return AttentionPlan(
        req_rows=_int64(req_rows),
        prefix_lens=prefix_lens,
        row_indptr=indptr,
        tail_indptr=indptr,
        tail_slots=_int64(slots),
        row_positions=positions,
        tail_positions=positions,
        prefix_starts=_optional_int64(prefix_starts),
    )


def verify_plan(
    *,
    req_rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    verify_lens: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor | None,
) -> AttentionPlan:
    """``verify_lens[r]`` rows per request under a tree mask (None: a chain).

    ``mask`` may be longer than needed, as a reused buffer is.
    """
    verify_lens = _int64(verify_lens)
    indptr = _indptr(verify_lens)
    mask_indptr = None
    if mask is not None:
        mask_indptr = _indptr(verify_lens * verify_lens)
        needed = int(mask_indptr[-1])
        if mask.numel() < needed:
            raise ValueError(
                f"custom_mask has {mask.numel()} elements, but verify_lens "
                f"{verify_lens.tolist()} need {needed} (QLEN_ONLY layout)"
            )
        mask = mask.view(-1)[:needed]
    positions = _int64(positions)
    return AttentionPlan(
        req_rows=_int64(req_rows),
        prefix_lens=_int64(prefix_lens),
        row_indptr=indptr,
        tail_indptr=indptr,
        tail_slots=_int64(slots),
        row_positions=positions,
        tail_positions=positions,
        mask=mask,
        mask_indptr=mask_indptr,
    )


def draft_decode_plan(
    *,
    req_rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    branch_slots: torch.Tensor,
    step: int,
    prefix_starts: torch.Tensor | None = None,
) -> AttentionPlan:
    """Step ``step`` (from 0) of a multi-step draft with ``topk`` branches.

    ``branch_slots`` is ``[bs, topk, num_steps]``: where branch b writes its token of
    step s. One group per request, ``topk`` rows, so that the branches share one pass
    over the prefix.
    """
    bs, topk, _ = branch_slots.shape
    depth = step + 1
    prefix_lens = _int64(prefix_lens)
    mask = None
    mask_indptr = None
    if topk > 1:
        own_branch = torch.eye(topk, dtype=torch.bool).repeat_interleave(depth, dim=1)
        mask = own_branch.reshape(-1).repeat(bs)
        mask_indptr = torch.arange(bs + 1) * (topk * topk * depth)
    tail = prefix_lens.view(bs, 1, 1) + torch.arange(depth).expand(bs, topk, depth)
    return AttentionPlan(
        req_rows=_int64(req_rows),
        prefix_lens=prefix_lens,
        row_indptr=torch.arange(bs + 1) * topk,
        tail_indptr=torch.arange(bs + 1) * (topk * depth),
        tail_slots=_int64(branch_slots[:, :, :depth].reshape(-1)),
        row_positions=(prefix_lens + step).repeat_interleave(topk),
        tail_positions=tail.reshape(-1),
        mask=mask,
        mask_indptr=mask_indptr,
        prefix_starts=_optional_int64(prefix_starts),
    )


def _int64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.int64).contiguous()


def _optional_int64(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else _int64(tensor)


def _indptr(lens: torch.Tensor) -> torch.Tensor:
    indptr = torch.zeros(lens.shape[0] + 1, dtype=torch.int64)
    torch.cumsum(lens, dim=0, out=indptr[1:])
    return indptr


def _ragged_arange(indptr: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """``starts[g], starts[g] + 1, ...`` for each group, one after another."""
    lens = indptr.diff()
    offsets = (starts - indptr[:-1]).repeat_interleave(lens)
    return torch.arange(offsets.shape[0]) + offsets
