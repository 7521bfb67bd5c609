"""The draft worker's attention backends: SGLang's factory knows its own names only."""

from collections.abc import Callable

from sglang_tetris.adapter.cpu_device.names import ATTENTION_BACKEND


def create_decode_backend(original: Callable[..., object], factory: object) -> object:
    """The multi-step draft backend, or None where a draft has at most one step."""
    if not _uses_this_backend(factory):
        return original(factory)
    if factory.speculative_num_steps <= 1:
        return None
    from sglang_tetris.adapter.attention.cpu import CpuMultiStepDraftBackend

    return CpuMultiStepDraftBackend(
        factory.draft_model_runner, factory.topk, factory.speculative_num_steps
    )


def create_draft_extend_backend(
    original: Callable[..., object], factory: object
) -> object:
    """The backend of the draft-extend forward."""
    if not _uses_this_backend(factory):
        return original(factory)
    from sglang_tetris.adapter.attention.cpu import CpuAttentionBackend

    return CpuAttentionBackend(factory.draft_model_runner)


def _uses_this_backend(factory: object) -> bool:
    from sglang.srt.runtime_context import attention_backends

    prefill, decode = attention_backends()
    own = factory.draft_attn_backend
    chosen = {own or prefill, own or decode}
    return chosen == {ATTENTION_BACKEND}
