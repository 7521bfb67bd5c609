"""Put the repository's draft weights into folders that SGLang can load.

EAGLE: the folder is a copy; SGLang gives the draft the target's embedding and head.
Standalone: the committed file holds the three layers and the final norm only. SGLang
loads a standalone draft as a model of its own, so the target's embedding is added,
twice: under `tie_word_embeddings: false` the head is a tensor of its own, and a tied
draft fails where SGLang replaces its embedding and head.
"""

import hashlib
import json
import shutil
from pathlib import Path

EAGLE_NAME = "smollm2-135m-eagle"
STANDALONE_NAME = "smollm2-135m-standalone"
HOT_TOKENS_NAME = "hot_tokens_8192"
EMBEDDING = "model.embed_tokens.weight"


def find_drafts_dir() -> Path:
    """Return `examples/drafts` of the checkout this package is installed from.

    Raises:
        RuntimeError: the package is not an editable install of a checkout.
    """
    folder = Path(__file__).resolve().parents[3] / "examples" / "drafts"
    if not folder.is_dir():
        raise RuntimeError(
            "The draft weights are part of the repository, not of the wheel: "
            "install it with pip install -e, or pass --drafts examples/drafts."
        )
    return folder


def drafts_fingerprint(drafts_dir: Path) -> str:
    """Return a checksum of the draft sources, as hex.

    Raises:
        RuntimeError: a source file is missing.
    """
    digest = hashlib.sha256()
    files = [drafts_dir / f"{HOT_TOKENS_NAME}.json"]
    for name in (EAGLE_NAME, STANDALONE_NAME):
        files += [drafts_dir / name / f for f in ("config.json", "model.safetensors")]
    for file in files:
        if not file.is_file():
            raise RuntimeError(f"The draft source {file} is missing.")
        digest.update(file.read_bytes())
    return digest.hexdigest()


def write_eagle(drafts_dir: Path, target: Path, folder: Path) -> None:
    """Write the EAGLE head to `folder`; the target is not needed."""
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(drafts_dir / EAGLE_NAME / name, folder / name)


def write_standalone(drafts_dir: Path, target: Path, folder: Path) -> None:
    """Write the standalone draft to `folder`, with the target's embedding and
    tokenizer."""
    from safetensors.torch import load_file, save_file

    weights = load_file(drafts_dir / STANDALONE_NAME / "model.safetensors")
    embedding = load_file(target / "model.safetensors")[EMBEDDING]
    weights[EMBEDDING] = embedding
    weights["lm_head.weight"] = embedding.clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = drafts_dir / STANDALONE_NAME / "config.json"
    shutil.copyfile(config, folder / "config.json")
    for file in target.glob("*token*"):
        shutil.copyfile(file, folder / file.name)


def write_hot_tokens(drafts_dir: Path, file: Path) -> None:
    """Write the hot-token map as SGLang's `--speculative-token-map` reads it: a
    pickled list of ids, which `torch.load(weights_only=True)` accepts."""
    import torch

    ids = json.loads((drafts_dir / f"{HOT_TOKENS_NAME}.json").read_text())
    torch.save([int(i) for i in ids], file)
