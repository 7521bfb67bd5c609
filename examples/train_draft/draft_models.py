"""The two drafts in plain torch, computing what SGLang 0.5.23 computes.

How SGLang feeds a draft, prefill and decode alike: at place i stands token i + 1, at
RoPE position i, and the output there predicts token i + 2. The first token of a
sequence is therefore never shown to the draft.

EAGLE: the input at place i is fc(embedding(token i + 1), feature i), feature i being
the target's hidden state after its final norm. One layer without input norm; its
output is the feature that predicts, with no norm after it (`llama_eagle.py`). While
drafting, step d runs at place i + d - 1 on the draft's own feature from the step
before; its keys are the places before i from true features, then the draft's own.
Standalone: a small Llama, so that drafting deeper changes nothing: each step sees
what a full pass over the same tokens would compute.
"""

from typing import Any

import torch
from llama_layers import Layer, Rope
from torch import Tensor, nn
from torch.nn import functional

MAX_TOKENS = 1024


def _shift(x: Tensor, places: int) -> Tensor:
    """Move `[b, t, ...]` to the right by `places`, zeros coming in."""
    if places == 0:
        return x
    return torch.cat([torch.zeros_like(x[:, :places]), x[:, :-places]], dim=1)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Grouped causal attention; the queries are the last rows of the keys."""
    rows, t = q.shape[1], k.shape[1]
    mask = torch.ones(rows, t, dtype=torch.bool).tril(t - rows)
    return functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        enable_gqa=True,
    ).transpose(1, 2)


class EagleDraft(nn.Module):
    """An EAGLE head; parameter names are those of SGLang's checkpoint."""

    def __init__(self, config: Any, embedding: Tensor) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=True)
        self.layers = nn.ModuleList([Layer(config, input_norm=False)])
        self.embedding = (embedding,)  # a tuple: shared, not a parameter
        self.rope = Rope(config, MAX_TOKENS)
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.scale = self.layers[0].self_attn.head_dim ** -0.5

    def forward(
        self, ids: Tensor, features: Tensor, depth: int, start: int = 0
    ) -> list[Tensor]:
        """Return the draft's features of drafting steps 1 to `depth`.

        Args:
            ids: `[b, t + 1]`, the tokens.
            features: `[b, t, hidden]`, the target's; feature i belongs to token i.
            start: the first row wanted; earlier ones are context only.

        Returns:
            `depth` tensors `[b, t - start, hidden]`, of rows j = start to t - 1. Row
            j of step d predicts token j + 2 and was drafted d - 1 steps after the
            last true feature, which is j - d + 1; rows j < start + d - 1 are
            meaningless.
        """
        embedded = functional.embedding(ids[:, 1:], self.embedding[0])
        t = features.shape[1]
        cos, sin = self.rope.at(torch.arange(t))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.append(k.repeat_interleave(self.group, dim=2))
            values.append(v.repeat_interleave(self.group, dim=2))
            if len(keys) == 1:
                return _causal(q, keys[0], values[0])
            return self._attend(q, keys, values)

        x = self.fc(torch.cat([embedded, features], dim=-1))
        outputs.append(self.layers[0](x, cos, sin, attend, start))
        embedded, cos, sin = embedded[:, start:], cos[start:], sin[start:]
        for _ in range(depth - 1):
            x = self.fc(torch.cat([embedded, _shift(outputs[-1], 1)], dim=-1))
            outputs.append(self.layers[0](x, cos, sin, attend))
        return outputs

    def _attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Step d: true places up to j - d + 1, then one own key for each step."""
        step, rows, t = len(keys) - 1, q.shape[1], keys[0].shape[1]
        q, first, mixed = (x.transpose(1, 2) for x in (q, keys[0], values[0]))
        scores = q @ first.transpose(-1, -2) * self.scale
        hidden = torch.ones(rows, t, dtype=torch.bool).triu(t - rows + 1 - step)
        scores = scores.masked_fill(hidden, float("-inf"))
        own_k = [_shift(keys[m], step - m) for m in range(1, step + 1)]
        own_v = [_shift(values[m], step - m) for m in range(1, step + 1)]
        own = torch.stack(
            [(q * k.transpose(1, 2)).sum(-1) * self.scale for k in own_k], dim=-1
        )
        shares = torch.cat([scores, own], dim=-1).softmax(-1)
        out = shares[..., :t] @ mixed
        for m, v in enumerate(own_v):
            out = out + shares[..., t + m, None] * v.transpose(1, 2)
        return out.transpose(1, 2)


class StandaloneDraft(nn.Module):
    """The target's shape with fewer layers, under the checkpoint's names."""

    def __init__(self, config: Any, embedding: Tensor, num_layers: int) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([Layer(config) for _ in range(num_layers)])
        self.model.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.embedding = (embedding,)
        self.rope = Rope(config, MAX_TOKENS)

    def forward(
        self, ids: Tensor, features: Tensor, depth: int, start: int = 0
    ) -> list[Tensor]:
        """Return `depth` times the same `[b, t - start, hidden]`; see EagleDraft."""
        x = functional.embedding(ids[:, 1:], self.embedding[0])
        cos, sin = self.rope.at(torch.arange(x.shape[1]))
        *first, last = self.model.layers
        for layer in first:
            x = layer(x, cos, sin, _causal)
        return [self.model.norm(last(x, cos, sin, _causal, start))] * depth


def init_eagle(draft: EagleDraft, ids: list[Tensor], features: list[Tensor]) -> None:
    """Set fc to the ridge regression of feature i + 1 on its inputs, and let the
    layer start as nearly the identity: a random fc barely moves in training."""
    size = draft.fc.in_features
    gram = torch.zeros(size + 1, size + 1, dtype=torch.float64)
    moment = torch.zeros(size + 1, draft.fc.out_features, dtype=torch.float64)
    for tokens, feature in zip(ids, features, strict=True):
        h = feature.float()
        embedded = functional.embedding(tokens[1 : len(h)].long(), draft.embedding[0])
        x = torch.cat([embedded, h[:-1], torch.ones(len(h) - 1, 1)], dim=-1)
        gram += (x.T @ x).double()
        moment += (x.T @ h[1:]).double()
    ridge = 1e-4 * gram.diagonal().mean() * torch.eye(size + 1, dtype=torch.float64)
    solution = torch.linalg.solve(gram + ridge, moment).float()
    layer = draft.layers[0]
    with torch.no_grad():
        draft.fc.weight.copy_(solution[:-1].T)
        draft.fc.bias.copy_(solution[-1])
        layer.self_attn.o_proj.weight.mul_(0.1)
        layer.mlp.down_proj.weight.mul_(0.1)


def init_standalone(
    draft: StandaloneDraft,
    weights: dict[str, Tensor],
    sources: tuple[int, ...],
    ids: list[Tensor],
    features: list[Tensor],
) -> None:
    """Copy the target's layers `sources` and its final norm, then refit the last
    down_proj so that the stream it ends in points where the target's does.

    With m the stream before the last MLP and a the activation that down_proj reads,
    it solves m + down_proj a = c * (feature / norm weight) by ridge regression. The
    final norm takes out c, which is set to twice the size of m.
    """
    state = {"model.norm.weight": weights["model.norm.weight"]}
    for place, source in enumerate(sources):
        prefix = f"model.layers.{source}."
        for name, tensor in weights.items():
            if name.startswith(prefix):
                state[f"model.layers.{place}.{name[len(prefix) :]}"] = tensor
    draft.load_state_dict(state)
    mlp = draft.model.layers[-1].mlp
    seen: dict[str, Tensor] = {}

    def keep_activation(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen["a"] = inputs[0][0]

    def keep_stream(
        module: nn.Module, inputs: tuple[Tensor, ...], result: Tensor
    ) -> None:
        seen["m"] = inputs[0][0]

    norm = draft.model.layers[-1].post_attention_layernorm
    hooks = [
        mlp.down_proj.register_forward_pre_hook(keep_activation),
        norm.register_forward_hook(keep_stream),
    ]
    size = mlp.down_proj.in_features
    gram = torch.zeros(size, size, dtype=torch.float64)
    moment = torch.zeros(size, mlp.down_proj.out_features, dtype=torch.float64)
    scale = 0.0
    with torch.no_grad():
        for tokens, feature in zip(ids, features, strict=True):
            draft(tokens[None, : len(feature)].long(), feature[None, :-1].float(), 1)
            scale = scale or 2 * float(seen["m"].pow(2).mean().sqrt())
            wanted = scale * feature[1:].float() / draft.model.norm.weight - seen["m"]
            gram += (seen["a"].T @ seen["a"]).double()
            moment += (seen["a"].T @ wanted).double()
        ridge = 1e-4 * gram.diagonal().mean() * torch.eye(size, dtype=torch.float64)
        mlp.down_proj.weight.copy_(torch.linalg.solve(gram + ridge, moment).float().T)
    for hook in hooks:
        hook.remove()
