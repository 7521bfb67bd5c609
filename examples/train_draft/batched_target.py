"""The target as a batch of slots: prefill some, decode all, refill what finished.

transformers' own `generate` waits for the longest answer of a batch; here a finished
slot takes the next prompt at once, which on two cores halves the time. The
arithmetic is Llama's, float32, on the very weights a server loads.

KV cache: `[layers, 2, slots, kv_heads, max_tokens, head_dim]`. Slot b holds positions
0 to lengths[b] - 1.
"""

from pathlib import Path

import torch
from llama_layers import Rope, apply_rope, load_target, rms_norm
from torch import Tensor
from torch.nn import functional


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T through numpy: on the CPU this was written for its BLAS is
    a third faster than torch's at 64 to 200 rows."""
    rows = x.reshape(-1, x.shape[-1]).numpy() @ weight.numpy().T
    return torch.from_numpy(rows).view(*x.shape[:-1], -1)


class BatchedTarget:
    """Greedy or sampled decoding of up to `slots` sequences at once."""

    def __init__(self, folder: Path, *, slots: int, max_tokens: int) -> None:
        self.config, weights = load_target(folder)
        self.weights = weights
        self.embedding = weights["model.embed_tokens.weight"]
        self.rope = Rope(self.config, max_tokens)
        c = self.config
        self.heads, self.kv_heads = c.num_attention_heads, c.num_key_value_heads
        self.head_dim = c.hidden_size // self.heads
        self.cache = torch.zeros(
            c.num_hidden_layers, 2, slots, self.kv_heads, max_tokens, self.head_dim
        )
        self.lengths = torch.zeros(slots, dtype=torch.int64)
        self.shared: list[int] = []
        self.shared_cache = self.shared_hidden = torch.empty(0)
        # One product for q, k, v and one for gate, up: fewer, larger products.
        self.layers = [self._fuse(i) for i in range(c.num_hidden_layers)]

    def _fuse(self, index: int) -> dict[str, Tensor]:
        def get(name: str) -> Tensor:
            return self.weights[f"model.layers.{index}.{name}.weight"]

        return {
            "qkv": torch.cat([get(f"self_attn.{p}_proj") for p in "qkv"]),
            "out": get("self_attn.o_proj"),
            "gate_up": torch.cat([get("mlp.gate_proj"), get("mlp.up_proj")]),
            "down": get("mlp.down_proj"),
            "norm1": get("input_layernorm"),
            "norm2": get("post_attention_layernorm"),
        }

    def _forward(self, ids: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """Return final-norm hidden states `[b, t, hidden]` of tokens `[b, t]`."""
        eps = self.config.rms_norm_eps
        cos, sin = self.rope.at(positions)
        span = int(positions.max()) + 1
        everything = slots.numel() == self.lengths.numel()
        visible = torch.arange(span) <= positions[..., None]  # [b, t, span]
        group = self.heads // self.kv_heads
        mask = visible[:, None].repeat_interleave(group, dim=2)
        x = functional.embedding(ids, self.embedding)
        b, t = ids.shape
        for layer, (keys, values) in zip(self.layers, self.cache, strict=True):
            qkv = product(rms_norm(x, layer["norm1"], eps), layer["qkv"])
            qkv = qkv.view(b, t, -1, self.head_dim)
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
            keys[slots[:, None], :, positions] = k
            values[slots[:, None], :, positions] = v
            if everything:
                past_k, past_v = keys[:, :, :span], values[:, :, :span]
            else:
                past_k, past_v = keys[slots, :, :span], values[slots, :, :span]
            # The heads of one group share their keys: fold them into the queries.
            q = q.view(b, t, self.kv_heads, group, self.head_dim).transpose(1, 2)
            mixed = functional.scaled_dot_product_attention(
                q.reshape(b, self.kv_heads, t * group, self.head_dim),
                past_k,
                past_v,
                attn_mask=mask,
            )
            mixed = mixed.view(b, self.kv_heads, t, group, -1).transpose(1, 2)
            x = x + product(mixed.reshape(b, t, -1), layer["out"])
            gate_up = product(rms_norm(x, layer["norm2"], eps), layer["gate_up"])
            gate, up = gate_up.chunk(2, dim=-1)
            x = x + product(functional.silu(gate) * up, layer["down"])
        return rms_norm(x, self.weights["model.norm.weight"], eps)

    def share(self, prefix: list[int]) -> None:
        """Compute once what most prompts begin with; no slot may be in use."""
        self.shared_hidden = self.prefill([0], [prefix])[0]
        self.shared_cache = self.cache[:, :, 0, :, : len(prefix)].clone()
        self.shared = prefix

    @torch.inference_mode()
    def prefill(self, slots: list[int], prompts: list[list[int]]) -> list[Tensor]:
        """Fill `slots` with `prompts`; return each prompt's hidden states."""
        skip = len(self.shared)
        if not all(len(p) > skip and p[:skip] == self.shared for p in prompts):
            skip = 0
        rest = [p[skip:] for p in prompts]
        longest = max(map(len, rest))
        ids = torch.tensor([p + [0] * (longest - len(p)) for p in rest])
        positions = torch.arange(skip, skip + longest).expand_as(ids)
        if skip:
            self.cache[:, :, slots, :, :skip] = self.shared_cache[:, :, None]
        hidden = self._forward(ids, positions, torch.tensor(slots))
        self.lengths[slots] = torch.tensor([len(p) for p in prompts])
        known = [self.shared_hidden] if skip else []
        return [
            torch.cat([*known, h[: len(p)]]) for h, p in zip(hidden, rest, strict=True)
        ]

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> Tensor:
        """Feed one token per slot; return the hidden states `[slots, hidden]`.

        A slot nobody uses is computed too, at its own last place, and ignored.
        """
        positions = self.lengths[:, None]
        hidden = self._forward(tokens[:, None], positions, torch.arange(len(tokens)))
        self.lengths += 1
        return hidden[:, 0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits over the whole vocabulary."""
        return product(hidden, self.embedding)
