"""A draft that does not fit is refused before anything is loaded, in one sentence."""

import json
from pathlib import Path

import pytest

from sglang_tetris.adapter.draft_config import (
    check_draft,
    check_same_tokens,
    draft_kind,
    read_config,
)
from sglang_tetris.core.errors import TetrisConfigError

LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 8}
EAGLE = LLAMA | {"architectures": ["LlamaForCausalLMEagle"]}
EAGLE3 = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]}


def _refusal(call, *args) -> str:
    with pytest.raises(TetrisConfigError) as caught:
        call(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("config", "kind"), [(LLAMA, "standalone"), (EAGLE, "eagle"), (EAGLE3, "eagle3")]
)
def test_kind_follows_from_the_drafts_own_config(config, kind) -> None:
    assert draft_kind(config) == kind
    assert check_draft(config, LLAMA, "auto", "draft") == kind
    assert check_draft(config, LLAMA, kind, "draft") == kind


def test_an_eagle3_head_under_the_eagle_flag_is_refused() -> None:
    message = _refusal(check_draft, EAGLE3, LLAMA, "eagle", "some/draft")
    assert "--tetris-draft eagle" in message
    assert "eagle3" in message
    assert "some/draft" in message


def test_another_vocabulary_is_refused_with_both_sizes() -> None:
    message = _refusal(check_draft, EAGLE | {"vocab_size": 65}, LLAMA, "auto", "d")
    assert "65" in message
    assert "64" in message


def test_hidden_size_matters_to_a_head_only() -> None:
    wide = {"hidden_size": 16}
    assert "16" in _refusal(check_draft, EAGLE | wide, LLAMA, "auto", "d")
    assert check_draft(LLAMA | wide, LLAMA, "auto", "d") == "standalone"


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    assert missing in _refusal(read_config, missing, "draft model")


@pytest.mark.parametrize("text", ["{", "[1]", "{}", '{"architectures": []}'])
def test_a_corrupt_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert "config.json" in _refusal(read_config, str(tmp_path), "draft model")


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    assert "no config.json" in _refusal(read_config, str(tmp_path), "draft model")


def _tokenizer(folder: Path, vocab: dict[str, int]) -> str:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    return str(folder)


def test_tokens_must_have_the_same_ids(tmp_path: Path) -> None:
    target = _tokenizer(tmp_path / "target", {"a": 0, "b": 1})
    same = _tokenizer(tmp_path / "same", {"b": 1, "a": 0})
    swapped = _tokenizer(tmp_path / "swapped", {"a": 1, "b": 0})
    check_same_tokens(same, target)
    check_same_tokens(str(tmp_path), target)  # no tokenizer of its own
    assert "other ids" in _refusal(check_same_tokens, swapped, target)
