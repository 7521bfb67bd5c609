"""A plain CPU as an SGLang device; see ``platform`` for what that means.

``activate`` and ``install`` are the two entry points; both are called in every
SGLang process, and do nothing where another device is in charge.
"""

import os

_PLATFORM_CLASS = "sglang_tetris.adapter.cpu_device.platform.TetrisCpuPlatform"
# Name of the entry point in group ``sglang.srt.platforms``.
PLATFORM_NAME = "tetris_cpu"


def activate() -> str | None:
    """The platform class for a machine without an accelerator, else None.

    None as well where the user chose SGLang's own CPU engine
    (``SGLANG_USE_CPU_ENGINE=1``). A choice by ``SGLANG_PLATFORM`` is made by SGLang
    before this is asked.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    if _accelerator_present():
        return None
    # Spawned processes inherit these; SGLang asks before it starts any.
    from sglang_tetris.adapter.cpu_device.process_settings import set_defaults

    set_defaults(os.environ)
    return _PLATFORM_CLASS


def _accelerator_present() -> bool:
    import torch

    if torch.cuda.is_available() or torch.xpu.is_available():
        return True
    if torch.accelerator.is_available():
        return True
    # Out-of-tree torch devices that register a module but no accelerator hook.
    return any(
        getattr(torch, name).is_available()
        for name in ("npu", "musa", "hpu")
        if hasattr(torch, name)
    )


def is_active() -> bool:
    """Whether this process runs on the plain-CPU platform."""
    from sglang.srt.platforms import current_platform

    return type(current_platform).__name__ == "TetrisCpuPlatform"


def install() -> None:
    """Register the attention backend and the torch functions, if active."""
    if not is_active():
        return
    from sglang_tetris.adapter.cpu_device.installation import install_all

    install_all()
