"""Convert the target's GGUF into a Hugging Face folder that SGLang can load.

Weights: dequantised by transformers, stored once as bf16 safetensors. (The server's
`--dtype` decides what they run in; bf16 to float32 is exact.)
Tokenizer: built from the vocabulary and the merges in the GGUF. transformers' own
conversion drops the pre-tokenizer that splits numbers into single digits, so a
number would be cut differently from how the model was trained. The definition used
here is the published one: Digits(individual) then ByteLevel, no normalizer.
"""

from pathlib import Path
from typing import Any

# Ids 0 to 2 and their roles in the published tokenizer of the Instruct model.
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
IM_START_ID, IM_END_ID = 1, 2
# SmolLM2's first 17 ids are control tokens (repository, issue and notebook marks).
NUM_SPECIAL_TOKENS = 17
CONTEXT_TOKENS = 8192


def build_tokenizer(tokens: list[str], merges: list[str], chat_template: str) -> Any:
    """Return SmolLM2's fast tokenizer from a GGUF vocabulary.

    Args:
        tokens: every token, its place being its id.
        merges: BPE merges in order, each "left right".
        chat_template: Jinja source, stored as it is.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(
                add_prefix_space=False, trim_offsets=True, use_regex=True
            ),
        ]
    )
    backend.decoder = decoders.ByteLevel(
        add_prefix_space=True, trim_offsets=True, use_regex=True
    )
    backend.add_special_tokens(
        [AddedToken(t, normalized=False) for t in tokens[:NUM_SPECIAL_TOKENS]]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=IM_START,
        eos_token=IM_END,
        pad_token=IM_END,
        unk_token=END_OF_TEXT,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def check_tokenizer(tokenizer: Any) -> None:
    """Raise RuntimeError if special tokens, digits or text do not round-trip."""
    for index, token in enumerate((END_OF_TEXT, IM_START, IM_END)):
        if tokenizer.encode(token) != [index] or tokenizer.decode([index]) != token:
            raise RuntimeError(
                f"The token {token!r} does not round-trip to id {index}."
            )
    text = "In 1984, 12.5 % of 3,600 naïve cafés paid €7 — déjà vu.\n\tx = 0x1F"
    ids = tokenizer.encode(text)
    if tokenizer.decode(ids) != text:
        raise RuntimeError(f"The tokenizer does not give back the text {text!r}.")
    if any(sum(c.isdigit() for c in tokenizer.decode([i])) > 1 for i in ids):
        raise RuntimeError("The tokenizer does not split numbers into single digits.")


def _read_vocabulary(gguf: Path) -> tuple[list[str], list[str], str]:
    from gguf import GGUFReader

    fields = GGUFReader(str(gguf)).fields
    names = ("ggml.tokens", "ggml.merges", "chat_template")
    tokens, merges, template = (fields[f"tokenizer.{n}"].contents() for n in names)
    return tokens, merges, template


def convert_target(gguf: Path, folder: Path) -> None:
    """Write config, bf16 safetensors, generation config and tokenizer to `folder`.

    Raises:
        RuntimeError: a tensor is missing, or the tokenizer fails its check.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM

    tokenizer = build_tokenizer(*_read_vocabulary(gguf))
    check_tokenizer(tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    config = loaded.config
    # Left by the GGUF reader; a server would take the bf16 weights for a GGUF.
    del config.quantization_config
    config.name_or_path = ""
    config.bos_token_id, config.eos_token_id = IM_START_ID, IM_END_ID
    config.pad_token_id = IM_END_ID
    config.max_position_embeddings = CONTEXT_TOKENS
    config.tie_word_embeddings = True
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    # save_pretrained refuses a model that came from a GGUF, so move its weights
    # into a fresh one.
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(loaded.state_dict(), strict=False)
    if unexpected or [name for name in missing if name != "lm_head.weight"]:
        raise RuntimeError(
            f"The GGUF's weights do not fit LlamaForCausalLM (missing {missing}, "
            f"unexpected {unexpected})."
        )
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=IM_START_ID, eos_token_id=IM_END_ID, pad_token_id=IM_END_ID
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
