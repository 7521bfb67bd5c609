"""What would break a user's first start: tokenizer, embeddings, repeats, bad files."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from sglang_tetris.tools import prepare_model
from sglang_tetris.tools.prepare_drafts import EMBEDDING, HOT_TOKENS_NAME
from sglang_tetris.tools.prepare_gguf import GGUF_NAME
from sglang_tetris.tools.prepare_model import PreparedModels, prepare


@pytest.fixture(scope="module")
def models() -> PreparedModels:
    return prepare()


def test_numbers_are_split_into_single_digits(models: PreparedModels) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models.target)
    pieces = tokenizer.tokenize("In 1984 it was 3600")
    assert pieces == ["In", "Ġ", *"1984", "Ġit", "Ġwas", "Ġ", *"3600"]


def test_special_tokens_round_trip_and_have_their_roles(models: PreparedModels) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models.target)
    for index, token in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>")):
        assert tokenizer.encode(token) == [index]
        assert tokenizer.decode([index]) == token
        assert tokenizer.decode([index], skip_special_tokens=True) == ""
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.pad_token_id == 2


def test_chat_template_has_the_default_system_prompt(models: PreparedModels) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models.target)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
        "Hugging Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_standalone_draft_has_the_targets_embedding(models: PreparedModels) -> None:
    target = load_file(models.target / "model.safetensors")
    draft = load_file(models.standalone / "model.safetensors")
    assert draft[EMBEDDING].equal(target[EMBEDDING])
    assert draft["lm_head.weight"].equal(target[EMBEDDING])


def test_eagle_checkpoint_is_named_as_sglang_reads_it(models: PreparedModels) -> None:
    names = set(load_file(models.eagle / "model.safetensors"))
    assert {"fc.weight", "fc.bias"} <= names
    assert not any("model." in name or "lm_head" in name for name in names)
    assert "layers.0.input_layernorm.weight" not in names


def test_second_call_does_nothing(models: PreparedModels) -> None:
    before = {path: path.stat().st_mtime_ns for path in models.target.parent.rglob("*")}
    lines: list[str] = []
    assert prepare(report=lines.append) == models
    after = {path: path.stat().st_mtime_ns for path in before}
    lock = models.target.parent / ".prepare.lock"
    assert lines == []
    assert {p for p in before if before[p] != after[p]} <= {lock}


def test_corrupt_gguf_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / GGUF_NAME).write_bytes(b"GGUF but not this one")
    assert prepare_model.main(["--cache", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert GGUF_NAME in message
    assert "delete it" in message
    assert message.count("\n") == 1
    assert message.endswith(".\n")
    assert not (tmp_path / prepare_model.TARGET_NAME).exists()


def test_missing_draft_source_is_named(models: PreparedModels, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=HOT_TOKENS_NAME):
        prepare(models.target.parent, tmp_path)


def test_failed_build_leaves_the_old_folder(tmp_path: Path) -> None:
    folder = tmp_path / "product"
    prepare_model._build(folder, "one", lambda f: (f / "x").touch())
    with pytest.raises(OSError, match="disk full"):
        prepare_model._build(folder, "two", _fail)
    assert prepare_model._is_current(folder, "one")
    assert (folder / "x").exists()
    prepare_model._build(folder, "three", lambda f: None)
    assert prepare_model._is_current(folder, "three")
    assert not (folder / "x").exists()
    assert list(tmp_path.iterdir()) == [folder]


def _fail(folder: Path) -> None:
    raise OSError("disk full")
