"""Write trained drafts as SGLang reads them, in bf16."""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang_tetris.tools.prepare_drafts import (
    EAGLE_NAME,
    HOT_TOKENS_NAME,
    STANDALONE_NAME,
)

FOLDERS = {"eagle": EAGLE_NAME, "standalone": STANDALONE_NAME}
ARCHITECTURES = {"eagle": "LlamaForCausalLMEagle", "standalone": "LlamaForCausalLM"}


def export_draft(
    kind: str, weights: dict[str, Tensor], target: Path, drafts_dir: Path
) -> Path:
    """Write config and weights; return the draft's folder.

    The embedding and the head are not in `weights`: they are the target's.
    """
    folder = drafts_dir / FOLDERS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    layers = {n.split("layers.")[1].split(".")[0] for n in weights if "layers." in n}
    config["architectures"] = [ARCHITECTURES[kind]]
    config["num_hidden_layers"] = len(layers)
    config["tie_word_embeddings"] = False
    config.pop("_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    small = {n: t.detach().to(torch.bfloat16).contiguous() for n, t in weights.items()}
    part = folder / "model.part"
    save_file(small, part, metadata={"format": "pt"})
    os.replace(part, folder / "model.safetensors")
    return folder


def save_hot_tokens(ids: list[int], drafts_dir: Path) -> None:
    """Write the hot tokens, ascending, as JSON."""
    text = json.dumps(ids, separators=(",", ":"))
    (drafts_dir / f"{HOT_TOKENS_NAME}.json").write_text(text + "\n")
