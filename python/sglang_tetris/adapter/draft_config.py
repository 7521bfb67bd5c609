"""Reads the draft's and the target's config.json: what kind of draft this is.

Everything here happens before SGLang loads a weight, so that a wrong path, a corrupt
file or a draft for another vocabulary costs a second and one sentence, not a minute and
a stack trace. Only local folders are read; a hub name is left to SGLang's own loader,
and its kind is then read through it.
"""

import json
from pathlib import Path
from typing import Any

from sglang_tetris.core.errors import TetrisConfigError

_EAGLE3_SUFFIX = "Eagle3"
_EAGLE_SUFFIXES = ("Eagle", "NextN", "MTP")


def read_config(
    path: str, role: str, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Return the model's config.json as a dict.

    path is a local folder or a hub name; role ("draft model", ...) goes into messages.
    Raises TetrisConfigError, one sentence, where it cannot be read.
    """
    folder = Path(path)
    if folder.is_dir():
        file = folder / "config.json"
        if not file.is_file():
            raise TetrisConfigError(f"the {role} at {path} has no config.json")
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TetrisConfigError(
                f"the {role}'s config.json at {path} cannot be read: {error}"
            ) from error
        if not isinstance(config, dict) or not config.get("architectures"):
            raise TetrisConfigError(
                f"the {role}'s config.json at {path} names no architectures"
            )
        return config
    if folder.is_absolute() or path.startswith(("./", "../")) or folder.is_file():
        raise TetrisConfigError(f"the {role} path {path} is not a model folder")
    return _read_hub_config(path, role, trust_remote_code)


def _read_hub_config(path: str, role: str, trust_remote_code: bool) -> dict[str, Any]:
    from sglang.srt.utils.hf_transformers_utils import get_config

    try:
        config = get_config(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise TetrisConfigError(f"the {role} {path} cannot be found") from error
    values: dict[str, Any] = config.to_dict()
    return values


def draft_kind(config: dict[str, Any]) -> str:
    """Return "eagle3", "eagle" or "standalone" for a draft's config.json."""
    architecture = str(config["architectures"][0])
    if architecture.endswith(_EAGLE3_SUFFIX):
        return "eagle3"
    if architecture.endswith(_EAGLE_SUFFIXES):
        return "eagle"
    return "standalone"


def check_draft(
    draft: dict[str, Any], target: dict[str, Any], wanted: str, path: str
) -> str:
    """Return the draft's kind; refuse one that contradicts the flags or the target.

    wanted is `--tetris-draft` (auto or a kind). Raises TetrisConfigError.
    """
    kind = draft_kind(draft)
    if wanted not in ("auto", kind):
        raise TetrisConfigError(
            f"--tetris-draft {wanted} does not fit the draft model at {path}, which is "
            f"{_article(kind)} draft ({draft['architectures'][0]})"
        )
    draft_vocab, target_vocab = vocab_size(draft), vocab_size(target)
    if draft_vocab != target_vocab:
        raise TetrisConfigError(
            f"the draft model at {path} has a vocabulary of {draft_vocab} tokens and "
            f"the target one of {target_vocab}; they must share one vocabulary"
        )
    draft_hidden = draft.get("target_hidden_size") or draft.get("hidden_size")
    target_hidden = _text_config(target).get("hidden_size")
    if kind != "standalone" and draft_hidden != target_hidden:
        raise TetrisConfigError(
            f"the draft model at {path} reads hidden states of size {draft_hidden} and "
            f"the target's have size {target_hidden}"
        )
    return kind


def check_same_tokens(draft_path: str, target_path: str) -> None:
    """Refuse a standalone draft whose tokenizer maps tokens to other ids.

    Compares tokenizer.json where both folders have one; a draft without a tokenizer of
    its own speaks in the target's ids. Raises TetrisConfigError.
    """
    vocabs = []
    for path in (draft_path, target_path):
        file = Path(path) / "tokenizer.json"
        if not file.is_file():
            return
        try:
            vocabs.append(
                json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TetrisConfigError(f"{file} cannot be read: {error}") from error
    if vocabs[0] != vocabs[1]:
        raise TetrisConfigError(
            f"the draft model at {draft_path} maps tokens to other ids than the target "
            f"at {target_path}; they must share one vocabulary"
        )


def vocab_size(config: dict[str, Any]) -> int | None:
    """Return the vocabulary size, looking into a multimodal config's text part."""
    return config.get("vocab_size") or _text_config(config).get("vocab_size")


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    text: dict[str, Any] = config.get("text_config") or config
    return text


def _article(kind: str) -> str:
    return f"an {kind}" if kind.startswith("e") else f"a {kind}"
