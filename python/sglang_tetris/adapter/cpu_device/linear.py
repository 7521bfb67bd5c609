"""Linear layers from packed weights; see ``csrc/linear.c`` for the format.

A weight is packed the first time it is used, and again whenever it changed (its
version or storage), so that loading new weights into a running server works. Packed
weights are kept per storage: a head that two models share is packed once.
"""

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)

from sglang_tetris.adapter.cpu_device.native_library import (
    ELEMENT_TYPES,
    check_struct,
    load_library,
    pointer,
)

_PANEL = 16


class _Args(ctypes.Structure):
    """``linear_args`` of csrc/linear.c."""

    _fields_ = [
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("panel_type", ctypes.c_int32),
        ("row_type", ctypes.c_int32),
    ]


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight ``[columns, k]`` in panels; ``panels`` is bfloat16 or float32."""

    panels: torch.Tensor
    columns: int
    k: int

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias`` in ``x``'s dtype, accumulated in float32."""
        rows = x.numel() // self.k
        out = torch.empty((*x.shape[:-1], self.columns), dtype=x.dtype)
        if rows == 0:
            return out
        # Named, so that they outlive the call.
        inputs = x.contiguous()
        offsets = None if bias is None else bias.to(torch.float32).contiguous()
        args = _Args(
            self.panels.data_ptr(),
            pointer(offsets),
            inputs.data_ptr(),
            out.data_ptr(),
            rows,
            self.k,
            self.columns,
            ELEMENT_TYPES[self.panels.dtype],
            ELEMENT_TYPES[x.dtype],
        )
        if load_library().tetris_linear(ctypes.byref(args)) != 0:
            raise MemoryError(f"no memory for {rows} rows of {self.k} inputs")
        return out


def pack(weight: torch.Tensor) -> PackedLinear:
    """Pack a contiguous float32 or bfloat16 weight ``[columns, k]``.

    As bfloat16 where every weight is one: a float32 run of a bfloat16 checkpoint.
    """
    columns, k = weight.shape
    dtype = torch.bfloat16 if _is_bfloat16(weight) else torch.float32
    num_panels = (columns + _PANEL - 1) // _PANEL
    panels = torch.empty(num_panels * k * _PANEL, dtype=dtype)
    load_library().tetris_pack_linear(
        ctypes.c_void_p(weight.data_ptr()),
        ctypes.c_int32(ELEMENT_TYPES[weight.dtype]),
        ctypes.c_void_p(panels.data_ptr()),
        ctypes.c_int32(ELEMENT_TYPES[dtype]),
        ctypes.c_int64(columns),
        ctypes.c_int64(k),
    )
    return PackedLinear(panels, columns, k)


def _is_bfloat16(weight: torch.Tensor) -> bool:
    if weight.dtype == torch.bfloat16:
        return True
    return bool((weight.view(torch.int32) & 0xFFFF == 0).all())


def is_available() -> bool:
    """Whether the kernels could be built on this machine."""
    if load_library() is None:
        return False
    check_struct("tetris_linear_args", _Args)
    return True


@dataclass(slots=True)
class _Entry:
    # Holding the weight keeps its address from being used again.
    weight: torch.Tensor
    version: int
    packed: PackedLinear


_cache: dict[tuple[int, tuple[int, ...]], _Entry] = {}


def packed_weight(weight: torch.Tensor) -> PackedLinear:
    """The packed form of ``weight``, made now if it is new or has changed."""
    key = (weight.data_ptr(), tuple(weight.shape))
    entry = _cache.get(key)
    # An inference tensor has no version; nothing can change it in place.
    version = 0 if weight.is_inference() else weight._version
    if entry is None or entry.version != version:
        entry = _Entry(weight.data, version, pack(weight.data))
        _cache[key] = entry
    return entry.packed


def supports(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``packed_linear`` covers these operands."""
    return (
        x.dtype == weight.dtype
        and x.dtype in ELEMENT_TYPES
        and weight.dim() == 2
        and weight.is_contiguous()
    )


def packed_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``F.linear`` over the packed form of ``weight``, or ``F.linear`` itself."""
    if not supports(x, weight):
        return F.linear(x, weight, bias)
    return packed_weight(weight).apply(x, bias)


class PackedLinearMethod(UnquantizedLinearMethod):
    """SGLang's method for a plain linear layer, over packed weights."""

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return packed_linear(x, layer.weight, bias)


def use_packed_weights(model: torch.nn.Module) -> None:
    """Let every plain linear layer of a loaded model use packed weights."""
    if not is_available():
        return
    for module in model.modules():
        if type(getattr(module, "quant_method", None)) is UnquantizedLinearMethod:
            module.quant_method = PackedLinearMethod()
            packed_weight(module.weight)
        elif type(module) is torch.nn.Linear:
            module.forward = _PlainForward(module)


class _PlainForward:
    """``nn.Linear.forward`` over packed weights (an EAGLE head's ``fc``)."""

    def __init__(self, module: torch.nn.Linear) -> None:
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return packed_linear(x, self.module.weight, self.module.bias)


def compute_lm_head(
    original: object,
    processor: object,
    hidden_states: torch.Tensor,
    lm_head: torch.nn.Module,
    embedding_bias: torch.Tensor | None = None,
    **options: object,
) -> torch.Tensor:
    """Around ``LogitsProcessor._compute_lm_head``: the plain case from packed weights.

    SGLang multiplies by the head's weight itself there, past its linear method.
    """
    plain = (
        not hasattr(lm_head, "set_lora")
        and not processor.use_fp32_lm_head
        # A head cut to the hot tokens is a plain tensor.
        and type(getattr(lm_head, "weight", None)) in (torch.nn.Parameter, torch.Tensor)
        and type(lm_head.quant_method) is UnquantizedEmbeddingMethod
    )
    if not (plain and is_available() and supports(hidden_states, lm_head.weight)):
        return original(processor, hidden_states, lm_head, embedding_bias, **options)
    return packed_linear(hidden_states, lm_head.weight)
