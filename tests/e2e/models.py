"""Tiny random models on disk: a Llama target and drafts of every kind for it.

Weights are drawn so that the logits are peaked: an arg-max is then not a near tie, and
token-for-token comparisons between two computations of the same thing are meaningful.
Every model is a function of its arguments alone, and is written once per directory.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

# A gap between the two best logits that rounding cannot close: the standard deviation
# of the logits is this many units.
_LOGIT_STD = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a tiny model; the defaults use grouped-query attention."""

    vocab_size: int = 512
    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    max_positions: int = 2048

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


# A vocabulary small enough for exact law tests, and the real target's own size.
LAW_SHAPE = Shape(vocab_size=64)
WIDE_SHAPE = Shape(vocab_size=49152)


def make_target(root: Path, shape: Shape | None = None, *, seed: int = 0) -> Path:
    """A ``LlamaForCausalLM`` with untied embeddings."""
    return _make(root, "target", shape or Shape(), seed)


def make_sliding_window_target(root: Path, *, window: int, seed: int = 0) -> Path:
    """An Olmo3 whose first layer sees ``window`` tokens and whose second sees all.

    (SGLang ignores the window of a Mistral.)
    """
    return _make(root, f"window{window}", Shape(), seed, window=window)


def make_standalone_draft(
    root: Path, shape: Shape | None = None, *, seed: int = 1
) -> Path:
    """A one-layer ``LlamaForCausalLM`` with weights of its own.

    For a draft that is always right use the target's own directory instead.
    """
    shape = shape or Shape()
    small = Shape(vocab_size=shape.vocab_size, num_layers=1)
    return _make(root, "standalone", small, seed)


def make_eagle_draft(root: Path, shape: Shape | None = None, *, seed: int = 2) -> Path:
    """A one-layer EAGLE head (``LlamaForCausalLMEagle``) for a target of ``shape``."""
    return _make(root, "eagle", shape or Shape(), seed)


def make_eagle3_draft(root: Path, shape: Shape | None = None, *, seed: int = 3) -> Path:
    """A one-layer EAGLE3 head (``LlamaForCausalLMEagle3``), vocabulary not reduced."""
    return _make(root, "eagle3", shape or Shape(), seed)


def _make(
    root: Path, kind: str, shape: Shape, seed: int, *, window: int | None = None
) -> Path:
    path = root / f"{kind}-v{shape.vocab_size}-l{shape.num_layers}-s{seed}"
    if path.exists():
        return path
    building = path.with_suffix(".building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "eagle": _eagle_weights,
        "eagle3": _eagle3_weights,
    }.get(kind, _llama_weights)(shape, generator)
    if window is not None:
        weights = _with_olmo3_norms(weights, shape)
    save_file(weights, building / "model.safetensors", metadata={"format": "pt"})
    config = _config(kind, shape, window)
    (building / "config.json").write_text(json.dumps(config, indent=1))
    _write_tokenizer(building, shape.vocab_size)
    building.rename(path)
    return path


def _config(kind: str, shape: Shape, window: int | None) -> dict[str, object]:
    architecture = {
        "eagle": "LlamaForCausalLMEagle",
        "eagle3": "LlamaForCausalLMEagle3",
    }.get(kind, "LlamaForCausalLM")
    config: dict[str, object] = {
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    if kind in ("eagle", "eagle3"):
        config["num_hidden_layers"] = 1
    if kind == "eagle3":
        config["draft_vocab_size"] = shape.vocab_size
    if window is not None:
        config |= {
            "architectures": ["Olmo3ForCausalLM"],
            "model_type": "olmo3",
            "sliding_window": window,
            "layer_types": ["sliding_attention", "full_attention"],
            "attention_bias": False,
            "rope_scaling": None,
            # What transformers takes for the sliding layers, whatever is set here.
            "rope_theta": 500000.0,
        }
    return config


def _llama_weights(shape: Shape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    weights = {
        "model.embed_tokens.weight": _normal(
            (shape.vocab_size, shape.hidden_size), 1.0, generator
        ),
        "model.norm.weight": torch.ones(shape.hidden_size),
        "lm_head.weight": _head(shape, generator),
    }
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        weights |= _layer(shape, generator, prefix, attention_in=shape.hidden_size)
        weights[f"{prefix}input_layernorm.weight"] = torch.ones(shape.hidden_size)
    return weights


def _with_olmo3_norms(
    weights: dict[str, torch.Tensor], shape: Shape
) -> dict[str, torch.Tensor]:
    """Olmo3 normalises queries, keys and each block's output, not its input."""
    kept = {k: v for k, v in weights.items() if "input_layernorm" not in k}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        kept[f"{prefix}post_feedforward_layernorm.weight"] = torch.ones(
            shape.hidden_size
        )
        for name, heads in (("q", shape.num_heads), ("k", shape.num_kv_heads)):
            kept[f"{prefix}self_attn.{name}_norm.weight"] = torch.ones(
                heads * shape.head_dim
            )
    return kept


def _eagle_weights(shape: Shape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """No ``model.`` prefix, no first norm; embedding and head are the target's.

    The head mostly passes its token's embedding on, as the target's residual stream
    does, so that a good part of its drafts is right.
    """
    hidden = shape.hidden_size
    weights = _layer(shape, generator, "layers.0.", attention_in=hidden)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"layers.0.{name}.weight"] *= 0.1
    fc = _normal((hidden, 2 * hidden), 0.1 * (2 * hidden) ** -0.5, generator)
    fc[:, :hidden] += torch.eye(hidden)
    return weights | {"fc.weight": fc, "fc.bias": torch.zeros(hidden)}


def _eagle3_weights(
    shape: Shape, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    hidden = shape.hidden_size
    weights = _layer(shape, generator, "midlayer.", attention_in=2 * hidden)
    return weights | {
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "fc.weight": _normal((hidden, 3 * hidden), (3 * hidden) ** -0.5, generator),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": _head(shape, generator),
    }


def _layer(
    shape: Shape, generator: torch.Generator, prefix: str, *, attention_in: int
) -> dict[str, torch.Tensor]:
    heads = shape.num_heads * shape.head_dim
    kv_heads = shape.num_kv_heads * shape.head_dim
    sizes = {
        "self_attn.q_proj": (heads, attention_in),
        "self_attn.k_proj": (kv_heads, attention_in),
        "self_attn.v_proj": (kv_heads, attention_in),
        "self_attn.o_proj": (shape.hidden_size, heads),
        "mlp.gate_proj": (shape.intermediate_size, shape.hidden_size),
        "mlp.up_proj": (shape.intermediate_size, shape.hidden_size),
        "mlp.down_proj": (shape.hidden_size, shape.intermediate_size),
    }
    weights = {
        f"{prefix}{name}.weight": _normal(size, size[1] ** -0.5, generator)
        for name, size in sizes.items()
    }
    # Sharper attention than a random product gives, so that context matters.
    weights[f"{prefix}self_attn.q_proj.weight"] *= 2.0
    weights[f"{prefix}post_attention_layernorm.weight"] = torch.ones(shape.hidden_size)
    return weights


def _head(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    std = _LOGIT_STD * shape.hidden_size**-0.5
    return _normal((shape.vocab_size, shape.hidden_size), std, generator)


def _normal(
    size: tuple[int, ...], std: float, generator: torch.Generator
) -> torch.Tensor:
    return torch.randn(size, generator=generator) * std


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    """A word tokenizer: token ``i`` is the word ``wi``, so text and ids correspond."""
    vocab = {"<s>": 0, "</s>": 1, "<unk>": 2}
    vocab |= {f"w{i}": i for i in range(3, vocab_size)}
    special = [
        {
            "id": i,
            "content": word,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for word, i in list(vocab.items())[:3]
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
