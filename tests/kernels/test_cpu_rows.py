"""RMS norm, SwiGLU and rotary embedding against plain torch."""

import pytest
import torch
import torch.nn.functional as F

from sglang_tetris.adapter.cpu_device import fused_rows
from sglang_tetris.adapter.cpu_device.native_library import load_library

pytestmark = pytest.mark.skipif(load_library() is None, reason="needs a C compiler")
DTYPES = [torch.float32, torch.bfloat16]
# One rounding of the result, and float32 sums in another order.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 64, 30])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    x, residual = (normal(200, width, dtype=dtype, seed=s) for s in (0, 1))
    weight = normal(width, dtype=dtype, seed=2)
    for other in (None, residual):
        out, total = fused_rows.rms_norm(x, weight, 1e-5, other)
        summed = x.float() if other is None else x.float() + other.float()
        scale = torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + 1e-5)
        expected = (summed * scale * weight.float()).to(dtype)
        tolerance = TOLERANCE[dtype] * 4
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
        if other is not None:
            assert torch.equal(total, summed.to(dtype))
        alone, _ = fused_rows.rms_norm(
            x[7:8].contiguous(), weight, 1e-5,
            None if other is None else other[7:8].contiguous(),
        )  # fmt: skip
        assert torch.equal(alone[0], out[7])


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    x = normal(70, 2 * 1536, dtype=dtype) * 4
    x[0, :8] = torch.tensor([0.0, -0.0, 90.0, -90.0, 1e-8, -1e-8, 200.0, -200.0])
    out = fused_rows.silu_and_mul(x)
    gate, up = x.float().chunk(2, dim=-1)
    expected = (F.silu(gate) * up).to(dtype)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(fused_rows.silu_and_mul(x[9:10].contiguous())[0], out[9])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_rotate(rotary_dim: int, dtype: torch.dtype) -> None:
    head_dim, half = 64, rotary_dim // 2
    positions = torch.tensor([0, 5, 999, 17, 17])
    angles = torch.outer(
        torch.arange(1000).float(), 10000.0 ** -(torch.arange(half) / half)
    )
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    # Slices of one fused projection, as the model passes them.
    qkv = normal(5, 12 * head_dim, dtype=dtype)
    q, k = qkv[:, : 6 * head_dim], qkv[:, 6 * head_dim : 9 * head_dim]
    before = qkv.clone()
    fused_rows.rotate(
        positions, q, k, cos_sin, head_dim=head_dim, rotary_dim=rotary_dim
    )
    heads = before.float().view(5, 12, head_dim)
    cos, sin = (t.unsqueeze(1) for t in cos_sin[positions].chunk(2, dim=-1))
    low, high = heads[..., :half], heads[..., half:rotary_dim]
    rotated = torch.cat(
        [low * cos - high * sin, high * cos + low * sin, heads[..., rotary_dim:]], -1
    )
    tolerance = TOLERANCE[dtype]
    got = qkv.view(5, 12, head_dim)
    torch.testing.assert_close(
        got[:, :9], rotated[:, :9].to(dtype), atol=tolerance, rtol=tolerance
    )
    assert torch.equal(got[:, 9:], before.view(5, 12, head_dim)[:, 9:])
