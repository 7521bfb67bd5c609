"""SGLang's sampling helpers in torch, for a device without their kernels."""

import torch

_MASK = 0xFFFFFFFF


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    """MurmurHash3 (32 bit) of (seed, position, column), as SGLang's kernel.

    ``seed`` ``[n]`` 64 bit, ``positions`` ``[n]`` and ``col_indices`` ``[m]`` integers,
    their low 32 bits. Four 4-byte blocks: seed low, seed high, position, column.
    Returns ``[n, m]`` uint32.
    """
    bits = seed.to(torch.int64)
    state = torch.zeros_like(bits)
    for block in (bits & _MASK, (bits >> 32) & _MASK, positions.to(torch.int64)):
        state = _mix(state, block & _MASK)
    hashed = _mix(state.unsqueeze(1), col_indices.to(torch.int64) & _MASK)
    hashed = hashed ^ 16  # length in bytes
    hashed = hashed ^ (hashed >> 16)
    hashed = _mul32(hashed, 0x85EBCA6B)
    hashed = hashed ^ (hashed >> 13)
    hashed = _mul32(hashed, 0xC2B2AE35)
    hashed = hashed ^ (hashed >> 16)
    return hashed.to(torch.uint32)


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _mul32(block, 0xCC9E2D51)
    block = ((block << 15) | (block >> 17)) & _MASK
    state = state ^ _mul32(block, 0x1B873593)
    state = ((state << 13) | (state >> 19)) & _MASK
    return (state * 5 + 0xE6546B64) & _MASK


def _mul32(value: torch.Tensor, factor: int) -> torch.Tensor:
    # int64 wraps on overflow; the low 32 bits of the product are right either way.
    return (value * factor) & _MASK
