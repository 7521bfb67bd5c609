"""SGLang's sampling helpers on the host, for a device without their kernels.

Each has the signature of the function it stands in for (see ``hooks``).
"""

import ctypes

import torch

from sglang_tetris.adapter.cpu_device.native_library import load_library

_MASK = 0xFFFFFFFF


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    """MurmurHash3 (32 bit) of (seed, position, column), as SGLang's kernel.

    ``seed`` ``[n]`` 64 bit, ``positions`` ``[n]`` and ``col_indices`` ``[m]`` integers,
    of which the low 32 bits count. Returns ``[n, m]`` uint32.
    """
    library = load_library()
    seed = seed.to(torch.int64).contiguous()
    positions = positions.to(torch.int64).contiguous()
    columns = col_indices.to(torch.int64).contiguous()
    if library is None:
        return torch_murmur_hash32(seed, positions, columns)
    out = torch.empty(seed.shape[0], columns.shape[0], dtype=torch.uint32)
    library.tetris_murmur_hash32(
        ctypes.c_void_p(seed.data_ptr()),
        ctypes.c_void_p(positions.data_ptr()),
        ctypes.c_void_p(columns.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(out.shape[0]),
        ctypes.c_int64(out.shape[1]),
    )
    return out


def torch_murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """``murmur_hash32`` of int64 tensors without the compiled kernel."""
    state = torch.zeros_like(seed)
    for block in (seed & _MASK, (seed >> 32) & _MASK, positions & _MASK):
        state = _mix(state, block)
    hashed = _mix(state.unsqueeze(1), columns & _MASK) ^ 16  # length in bytes
    hashed = _mul32(hashed ^ (hashed >> 16), 0x85EBCA6B)
    hashed = _mul32(hashed ^ (hashed >> 13), 0xC2B2AE35)
    return (hashed ^ (hashed >> 16)).to(torch.uint32)


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _mul32(block, 0xCC9E2D51)
    block = ((block << 15) | (block >> 17)) & _MASK
    state = state ^ _mul32(block, 0x1B873593)
    state = ((state << 13) | (state >> 19)) & _MASK
    return (state * 5 + 0xE6546B64) & _MASK


def _mul32(value: torch.Tensor, factor: int) -> torch.Tensor:
    # int64 wraps on overflow; the low 32 bits of the product are right either way.
    return (value * factor) & _MASK


def top_k_renorm(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """Keep each row's ``top_ks`` most probable tokens (ties with the last as well)."""
    top_ks = top_ks.to(torch.int64).clamp(min=1, max=probs.shape[-1])
    best = torch.topk(probs, int(top_ks.max()), dim=-1).values
    return _keep_from(probs, best.gather(-1, (top_ks - 1).unsqueeze(-1)))


def top_p_renorm(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Keep each row's most probable tokens until they hold ``top_ps`` of its mass."""
    ordered = probs.sort(dim=-1, descending=True).values
    before = ordered.cumsum(dim=-1) - ordered
    kept = (before < top_ps.unsqueeze(-1)).sum(dim=-1, keepdim=True).clamp(min=1)
    return _keep_from(probs, ordered.gather(-1, kept - 1))


def _keep_from(probs: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    kept = probs.masked_fill(probs < threshold, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)
