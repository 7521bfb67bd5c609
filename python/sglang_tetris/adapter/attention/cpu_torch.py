"""Paged attention in plain torch: the reference path, and the fallback.

Same contract as ``cpu_native``; slower, because it copies every request's keys into
a padded block. Used where no C compiler is found, and for head sizes, dtypes or logit
caps that the native kernel does not cover.
"""

import torch

from sglang_tetris.adapter.attention.cpu_plan import AttentionPlan


def store_kv(
    *,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write ``k`` and ``v`` (``[T, heads, dim]``) to ``slots`` of the caches."""
    k_cache[slots] = k.to(k_cache.dtype)
    v_cache[slots] = v.to(v_cache.dtype)


def paged_attention(
    plan: AttentionPlan,
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    scaling: float,
    window: int = -1,
    logit_cap: float = 0.0,
    slot_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of ``q`` (``[T, q heads, dim]``) over the plan's keys.

    ``k_cache``, ``v_cache``: ``[slots, kv heads, dim]``. ``window`` < 0: none.
    ``slot_map`` translates slots before they index the caches (a sliding-window
    pool). Accumulates in float32. Returns ``[T, q heads, v dim]`` in ``q``'s dtype.
    """
    if plan.num_rows == 0:
        return q.new_empty(0, q.shape[1], v_cache.shape[-1])
    row_lens = plan.row_indptr.diff()
    tail_lens = plan.tail_indptr.diff()
    max_rows = int(row_lens.max())
    slots, key_positions, is_tail, tail_index = _padded_keys(
        plan, req_to_token, tail_lens
    )
    if slot_map is not None:
        slots = slot_map[slots].to(torch.int64)

    group = torch.repeat_interleave(torch.arange(plan.num_groups), row_lens)
    local = torch.arange(plan.num_rows) - plan.row_indptr[group]
    visible = _visible(
        plan, group, local, key_positions, is_tail, tail_index, row_lens, tail_lens
    )
    if window >= 0:
        low = (plan.row_positions - window).unsqueeze(1)
        visible &= key_positions[group] >= low
    if plan.prefix_starts is not None:
        hidden = key_positions < plan.prefix_starts.unsqueeze(1)
        visible &= ~(hidden & ~is_tail)[group]

    num_kv_heads = k_cache.shape[1]
    share = q.shape[1] // num_kv_heads
    padded_q = q.new_zeros(plan.num_groups, max_rows, *q.shape[1:], dtype=torch.float32)
    padded_q[group, local] = q.to(torch.float32)
    bias = torch.full((plan.num_groups, max_rows, slots.shape[1]), float("-inf"))
    bias[group, local] = torch.where(visible, 0.0, float("-inf"))

    keys = k_cache[slots].to(torch.float32).transpose(1, 2)
    values = v_cache[slots].to(torch.float32).transpose(1, 2)
    heads_q = padded_q.unflatten(2, (num_kv_heads, share)).permute(0, 2, 3, 1, 4)
    scores = torch.einsum("ghsrd,ghkd->ghsrk", heads_q, keys) * scaling
    if logit_cap > 0.0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    scores = scores + bias[:, None, None]
    # A padding row sees nothing; it is dropped below.
    probs = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    out = torch.einsum("ghsrk,ghkd->grhsd", probs, values).flatten(2, 3)
    return out[group, local].to(q.dtype)


def _padded_keys(
    plan: AttentionPlan, req_to_token: torch.Tensor, tail_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``[groups, keys]``: slots, sequence positions, tail flags, tail numbers."""
    key_lens = plan.prefix_lens + tail_lens
    columns = torch.arange(int(key_lens.max())).expand(plan.num_groups, -1)
    prefix_lens = plan.prefix_lens.unsqueeze(1)
    is_tail = (columns >= prefix_lens) & (columns < key_lens.unsqueeze(1))
    in_row = columns.clamp(max=req_to_token.shape[1] - 1)
    slots = req_to_token[plan.req_rows.unsqueeze(1), in_row].to(torch.int64)
    # Row-major order of the tail flags is the order of tail_slots. Padding keeps
    # whatever slot the table holds there, which may be stale: make it readable.
    slots = slots.masked_fill(columns >= key_lens.unsqueeze(1), 0)
    slots[is_tail] = plan.tail_slots
    positions = columns.clone()
    positions[is_tail] = plan.tail_positions
    return slots, positions, is_tail, columns - prefix_lens


def _visible(
    plan: AttentionPlan,
    group: torch.Tensor,
    local: torch.Tensor,
    key_positions: torch.Tensor,
    is_tail: torch.Tensor,
    tail_index: torch.Tensor,
    row_lens: torch.Tensor,
    tail_lens: torch.Tensor,
) -> torch.Tensor:
    """``[rows, keys]``: what each row sees, the window aside."""
    row_tail = is_tail[group]
    row_tail_index = tail_index[group]
    if plan.mask is None:
        last = (tail_lens - row_lens)[group] + local
        tail_visible = row_tail & (row_tail_index <= last.unsqueeze(1))
    else:
        start = plan.mask_indptr[group] + local * tail_lens[group]
        flat = start.unsqueeze(1) + row_tail_index
        flat = flat.clamp(min=0, max=plan.mask.numel() - 1)
        tail_visible = row_tail & plan.mask[flat]
    in_prefix = row_tail_index < 0
    return in_prefix | tail_visible
