"""Wire the plain-CPU device into SGLang."""

from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.attention_registry import register_attention_backend

from sglang_tetris.adapter.cpu_device.fused_rows import register_fused_rows
from sglang_tetris.adapter.cpu_device.hooks import register_hooks, unapplied_hooks
from sglang_tetris.adapter.cpu_device.names import ATTENTION_BACKEND


def install_all() -> None:
    """Register the backend, its choices and the hooks; once per process."""
    register_attention_backend(ATTENTION_BACKEND)(_create_backend)
    names = [ATTENTION_BACKEND]
    choices.add_attention_backend_choices(names)
    choices.add_draft_attention_backend_choices(names)
    choices.add_deterministic_attention_backend_choices(names)
    choices.add_radix_supported_deterministic_attention_backend_choices(names)
    register_fused_rows()
    register_hooks()


def _create_backend(runner: object) -> object:
    missing = unapplied_hooks()
    if missing:
        raise RuntimeError(
            "the plain-CPU device could not replace these SGLang functions: "
            f"{', '.join(missing)}. Install sglang==0.5.23, or see the log above."
        )
    from sglang_tetris.adapter.attention.cpu import CpuAttentionBackend

    return CpuAttentionBackend(runner)
