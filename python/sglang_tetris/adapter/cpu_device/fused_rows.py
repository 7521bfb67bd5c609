"""RMS norm, SwiGLU and rotary embedding by the kernels of ``csrc/rows.c``.

SGLang's fused operators look up their out-of-tree forward by the platform's dispatch
key; what these do not cover goes to the operator's own ``forward_native``.
"""

import ctypes

import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding

from sglang_tetris.adapter.cpu_device.native_library import (
    ELEMENT_TYPES,
    check_struct,
    load_library,
    pointer,
)
from sglang_tetris.adapter.cpu_device.platform import FUSED_OP_KEY

_LANES = 8


class _RopeArgs(ctypes.Structure):
    """``rope_args`` of csrc/rows.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("positions", "q", "k", "cos_sin")),
        *((name, ctypes.c_int64) for name in ("rows", "q_stride", "k_stride")),
        *((name, ctypes.c_int64) for name in ("q_heads", "k_heads")),
        *((name, ctypes.c_int64) for name in ("dim", "rotary_dim")),
        *((name, ctypes.c_int32) for name in ("type", "cache_type")),
    ]


def register_fused_rows() -> None:
    """Register the forwards; does nothing where the kernels cannot be built."""
    if load_library() is None:
        return
    check_struct("tetris_rope_args", _RopeArgs)
    register = BaseFusedOp.register_oot_forward
    register(RMSNorm, rms_norm_forward, FUSED_OP_KEY)
    register(SiluAndMul, silu_and_mul_forward, FUSED_OP_KEY)
    for rotary in (RotaryEmbedding, Llama3RotaryEmbedding):
        register(rotary, rotary_forward, FUSED_OP_KEY)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``x / rms(x) * weight`` of the sum with the residual; and that sum."""
    out = torch.empty_like(x)
    total = None if residual is None else torch.empty_like(x)
    load_library().tetris_rms_norm(
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_void_p(pointer(residual)),
        ctypes.c_void_p(weight.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_void_p(pointer(total)),
        ctypes.c_int64(x.numel() // x.shape[-1]),
        ctypes.c_int64(x.shape[-1]),
        ctypes.c_float(epsilon),
        ctypes.c_int32(ELEMENT_TYPES[x.dtype]),
    )
    return out, total


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(first half) * second half`` of the last dimension."""
    width = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype)
    load_library().tetris_silu_mul(
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(out.numel() // max(width, 1)),
        ctypes.c_int64(width),
        ctypes.c_int32(ELEMENT_TYPES[x.dtype]),
    )
    return out


def rotate(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    head_dim: int,
    rotary_dim: int,
) -> None:
    """Rotate ``query`` and ``key`` (``[T, heads * head_dim]``) in place, neox style."""
    args = _RopeArgs(
        positions.data_ptr(),
        query.data_ptr(),
        key.data_ptr(),
        cos_sin.data_ptr(),
        positions.numel(),
        query.stride(0),
        key.stride(0),
        query.shape[1] // head_dim,
        key.shape[1] // head_dim,
        head_dim,
        rotary_dim,
        ELEMENT_TYPES[query.dtype],
        ELEMENT_TYPES[cos_sin.dtype],
    )
    load_library().tetris_rope(ctypes.byref(args))


def rms_norm_forward(
    op: RMSNorm,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: torch.nn.Module | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``RMSNorm.forward_native`` for plain contiguous rows of one type."""
    plain = (
        post_residual_addition is None
        and x.dtype in ELEMENT_TYPES
        and x.dtype == op.weight.dtype
        and x.is_contiguous()
        and x.shape[-1] == op.hidden_size
        and op.variance_size_override is None
        and not op.cast_x_before_out_mul
        and not op.fp32_residual
        and op.override_orig_dtype in (None, x.dtype)
    )
    if residual is not None:
        plain = plain and residual.dtype == x.dtype and residual.is_contiguous()
    if not plain:
        return op.forward_native(x, residual, post_residual_addition, quant_linear)
    out, total = rms_norm(x, op.weight, op.variance_epsilon, residual)
    return out if residual is None else (out, total)


def silu_and_mul_forward(op: SiluAndMul, x: torch.Tensor) -> torch.Tensor:
    """``SiluAndMul.forward_native`` for contiguous rows."""
    covered = x.dtype in ELEMENT_TYPES and x.is_contiguous()
    if not covered or x.shape[-1] % (2 * _LANES):
        return op.forward_native(x)
    return silu_and_mul(x)


def rotary_forward(
    op: RotaryEmbedding,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: object = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``RotaryEmbedding.forward_native`` in place, as the device kernels are."""
    covered = (
        offsets is None
        and fused_set_kv_buffer_arg is None
        and op.is_neox_style
        and query.dtype in ELEMENT_TYPES
        and query.dtype == key.dtype
        and op.cos_sin_cache.dtype in ELEMENT_TYPES
        and positions.dim() == 1
        and positions.dtype == torch.int64
        and positions.is_contiguous()
        and all(t.dim() == 2 and t.stride(1) == 1 for t in (query, key))
    )
    if not covered:
        return op.forward_native(
            positions, query, key, offsets, fused_set_kv_buffer_arg
        )
    rotate(
        positions,
        query,
        key,
        op.cos_sin_cache,
        head_dim=op.head_size,
        rotary_dim=op.rotary_dim,
    )
    return query, key
