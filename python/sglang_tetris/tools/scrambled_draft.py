"""A draft that is as fast as another and always wrong, to measure what that costs."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
# What enters the first layer: an EAGLE head's fusion, or a small model's embeddings.
_INPUTS = ("fc.weight", "fc.bias", "model.embed_tokens.weight")


def scrambled_copy(draft: Path) -> Path:
    """Return a folder beside the draft's with its hidden channels in another order.

    The same order each time. ValueError if no tensor of `_INPUTS` is in its weights.
    """
    copy = draft.with_name(f"{draft.name}-scrambled")
    if (copy / WEIGHTS).exists():
        return copy
    weights = load_file(draft / WEIGHTS)
    inputs = [name for name in _INPUTS if name in weights]
    if not inputs:
        raise ValueError(f"{draft} has none of the tensors {', '.join(_INPUTS)}")
    for name in inputs:
        axis = 1 if name.startswith("model.") else 0
        size = weights[name].shape[axis]
        order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
        weights[name] = weights[name].index_select(axis, order).contiguous()
    shutil.copytree(draft, copy, ignore=shutil.ignore_patterns(WEIGHTS))
    save_file(weights, copy / WEIGHTS)
    return copy
