"""Llama's parts in plain torch, shared by the generator and both drafts.

Names of parameters follow the Hugging Face checkpoints, so a state dict is a
checkpoint. RoPE is the half-split ("neox") form that SGLang and transformers use.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def load_target(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Return the target's config and its weights as float32."""
    weights = load_file(folder / "model.safetensors")
    return AutoConfig.from_pretrained(folder), {
        name: tensor.float() for name, tensor in weights.items()
    }


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


class Rope:
    """cos and sin of every position below `max_tokens`, `[max_tokens, head_dim]`."""

    def __init__(self, config: Any, max_tokens: int) -> None:
        dim = config.hidden_size // config.num_attention_heads
        theta = config.rope_parameters["rope_theta"]
        rate = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = torch.arange(max_tokens)[:, None] * rate
        angle = torch.cat([angle, angle], dim=-1)
        self.cos, self.sin = angle.cos().float(), angle.sin().float()

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin for `[..., t]` positions, as `[..., t, 1, head_dim]`."""
        return self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[..., t, heads, head_dim]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Projections around an `attend` that the caller chooses."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.head_dim = hidden // config.num_attention_heads
        kv = self.head_dim * config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, kv, bias=False)
        self.v_proj = nn.Linear(hidden, kv, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, start: int
    ) -> Tensor:
        """Return rows from `start` on; earlier ones are keys and values only.

        `attend` takes q `[b, t - start, heads, head_dim]`, k and v
        `[b, t, kv_heads, head_dim]`, and returns the shape of q.
        """
        q, k, v = (
            projection(rows).unflatten(-1, (-1, self.head_dim))
            for projection, rows in (
                (self.q_proj, x[:, start:]),
                (self.k_proj, x),
                (self.v_proj, x),
            )
        )
        q = apply_rope(q, cos[start:], sin[start:])
        mixed = attend(q, apply_rope(k, cos, sin), v)
        return self.o_proj(mixed.flatten(-2))


class Mlp(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer; `input_norm=False` is SGLang's first EAGLE layer."""

    def __init__(self, config: Any, *, input_norm: bool = True) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        if input_norm:
            self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.input_norm = input_norm
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = Mlp(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, start: int = 0
    ) -> Tensor:
        """Return the rows of `[b, t, hidden]` from `start` on."""
        read = self.input_layernorm(x) if self.input_norm else x
        x = x[:, start:] + self.self_attn(read, cos, sin, attend, start)
        return x + self.mlp(self.post_attention_layernorm(x))
