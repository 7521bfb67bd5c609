"""Paged attention by the compiled kernel, straight from the key/value pool.

``NativePlan`` lays a plan out for the kernel once per forward; ``attend`` runs one
layer. What ``supports`` refuses is left to ``cpu_torch``, which has the same contract.
"""

import ctypes

import torch

from sglang_tetris.adapter.attention.cpu_plan import AttentionPlan
from sglang_tetris.adapter.cpu_device.native_library import (
    ELEMENT_TYPES,
    check_struct,
    load_library,
    pointer,
)

# Limits of csrc/attention.c.
_MAX_ROWS = 32
_MAX_DIM = 256
_LANES = 8

_POINTERS = (
    "req_rows",
    "prefix_starts",
    "prefix_lens",
    "row_indptr",
    "tail_indptr",
    "tail_slots",
    "row_positions",
    "tail_positions",
    "mask",
    "mask_indptr",
)


class _Args(ctypes.Structure):
    """``attention_args`` of csrc/attention.c."""

    _fields_ = [
        ("num_groups", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("num_blocks", ctypes.c_int64),
        ("rows_per_block", ctypes.c_int64),
        ("block_group", ctypes.c_void_p),
        ("block_row", ctypes.c_void_p),
        ("req_to_token", ctypes.c_void_p),
        ("req_to_token_stride", ctypes.c_int64),
        ("slot_map", ctypes.c_void_p),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("k_slot_stride", ctypes.c_int64),
        ("v_slot_stride", ctypes.c_int64),
        ("q", ctypes.c_void_p),
        ("k_new", ctypes.c_void_p),
        ("v_new", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("new_slots", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("k_new_stride", ctypes.c_int64),
        ("v_new_stride", ctypes.c_int64),
        ("num_q_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("v_dim", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scaling", ctypes.c_float),
        ("row_type", ctypes.c_int32),
        ("cache_type", ctypes.c_int32),
    ]


def is_available() -> bool:
    """Whether the kernel could be built on this machine."""
    if load_library() is None:
        return False
    check_struct("tetris_attention_args", _Args)
    return True


def supports(
    *,
    row_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    num_q_heads: int,
    num_kv_heads: int,
    dim: int,
    v_dim: int,
    logit_cap: float = 0.0,
) -> bool:
    """Whether the kernel covers a layer of these sizes and types."""
    return (
        row_dtype in ELEMENT_TYPES
        and cache_dtype in ELEMENT_TYPES
        and num_q_heads // num_kv_heads <= _MAX_ROWS
        and all(d % _LANES == 0 and d <= _MAX_DIM for d in (dim, v_dim))
        and not logit_cap
    )


class NativePlan:
    """An ``AttentionPlan`` with its rows cut into blocks, for one head ratio."""

    def __init__(self, plan: AttentionPlan, *, share: int) -> None:
        self.plan = plan
        self.share = share
        rows_per_block = max(1, _MAX_ROWS // share)
        counts = (plan.row_indptr.diff() + rows_per_block - 1) // rows_per_block
        self._block_group = torch.repeat_interleave(counts)
        starts = torch.cumsum(counts, dim=0) - counts
        number = torch.arange(self._block_group.shape[0]) - starts[self._block_group]
        self._block_row = number * rows_per_block
        self._args = _Args(
            num_groups=plan.num_groups,
            num_rows=plan.num_rows,
            num_blocks=self._block_group.shape[0],
            rows_per_block=rows_per_block,
            block_group=self._block_group.data_ptr(),
            block_row=self._block_row.data_ptr(),
            **{name: pointer(getattr(plan, name)) for name in _POINTERS},
        )

    def attend(
        self,
        *,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        scaling: float,
        window: int = -1,
        slot_map: torch.Tensor | None = None,
        new_kv: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """As ``cpu_torch.paged_attention``; ``new_kv`` is (k, v, slots) to store first.

        ``q``, ``k`` and ``v`` are ``[T, heads, dim]`` with contiguous rows; ``k`` and
        ``v`` have the caches' dtype.
        """
        out = torch.empty((q.shape[0], q.shape[1], v_cache.shape[-1]), dtype=q.dtype)
        args = self._args
        args.req_to_token = req_to_token.data_ptr()
        args.req_to_token_stride = req_to_token.stride(0)
        args.slot_map = pointer(slot_map)
        args.k_cache = k_cache.data_ptr()
        args.v_cache = v_cache.data_ptr()
        args.k_slot_stride = k_cache.stride(0)
        args.v_slot_stride = v_cache.stride(0)
        args.q = q.data_ptr()
        args.q_stride = q.stride(0)
        args.out = out.data_ptr()
        args.num_q_heads = q.shape[1]
        args.num_kv_heads = k_cache.shape[1]
        args.dim = q.shape[2]
        args.v_dim = v_cache.shape[2]
        args.window = window
        args.scaling = scaling
        args.row_type = ELEMENT_TYPES[q.dtype]
        args.cache_type = ELEMENT_TYPES[k_cache.dtype]
        if new_kv is None:
            args.k_new = None
        else:
            k, v, slots = new_kv
            args.k_new = k.data_ptr()
            args.v_new = v.data_ptr()
            args.k_new_stride = k.stride(0)
            args.v_new_stride = v.stride(0)
            args.new_slots = slots.data_ptr()
        load_library().tetris_attention(ctypes.byref(args))
        return out


def move_slots(
    caches: list[torch.Tensor], target: torch.Tensor, source: torch.Tensor
) -> None:
    """``cache[target] = cache[source]`` for each cache, all reads first."""
    num_slots = target.numel()
    if num_slots == 0:
        return
    row_bytes = [cache.stride(0) * cache.element_size() for cache in caches]
    scratch = [torch.empty(n * num_slots, dtype=torch.uint8) for n in row_bytes]
    count = len(caches)
    load_library().tetris_move_slots(
        (ctypes.c_void_p * count)(*(cache.data_ptr() for cache in caches)),
        ctypes.c_int64(count),
        (ctypes.c_int64 * count)(*row_bytes),
        ctypes.c_void_p(target.data_ptr()),
        ctypes.c_void_p(source.data_ptr()),
        ctypes.c_int64(num_slots),
        (ctypes.c_void_p * count)(*(buffer.data_ptr() for buffer in scratch)),
    )
