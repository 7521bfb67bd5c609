"""Entry points through which SGLang finds this package.

SGLang calls both in every process, before it parses a command line. Where the installed
SGLang is not the one this package knows, TETRIS is not registered and SGLang works as
without it; ``python -m sglang_tetris.tools.doctor`` then says what differs.
"""

import logging

logger = logging.getLogger(__name__)


def register() -> None:
    """Register TETRIS and the CPU device (group ``sglang.srt.plugins``)."""
    from sglang_tetris.adapter import upstream

    mismatches = upstream.check()
    if mismatches:
        logger.error(
            "TETRIS is not available: %d of the SGLang symbols it uses differ from "
            "those of version %s; run python -m sglang_tetris.tools.doctor",
            len(mismatches),
            upstream.SUPPORTED_VERSION,
        )
        return
    from sglang_tetris.adapter import algorithm, cpu_device, hooks

    cpu_device.install()
    algorithm.register()
    hooks.register()


def activate() -> str | None:
    """Offer the plain-CPU platform (group ``sglang.srt.platforms``)."""
    from sglang_tetris.adapter import cpu_device

    return cpu_device.activate()
