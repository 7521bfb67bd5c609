"""The speculative algorithm as SGLang sees it: what kind of draft it has, what it can.

SGLang dispatches on `is_eagle()`, `is_standalone()` and the like in every process; the
answers follow from the draft's kind. The radix cache keys by token pairs for an EAGLE
draft (its KV at position i needs token i + 1) and by single tokens for a standalone
draft, which here runs unshifted (see draft.py).
"""

from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_tetris.adapter import options
from sglang_tetris.adapter.startup import finish_server_args, refuse_unsupported

NAME = "TETRIS"


class TetrisAlgorithm(CustomSpecAlgo):
    """TETRIS as a member of SGLang's family of speculative algorithms."""

    def is_eagle(self) -> bool:
        return options.current().draft_kind in ("eagle", "eagle3")

    def is_eagle3(self) -> bool:
        return options.current().draft_kind == "eagle3"

    def is_standalone(self) -> bool:
        return options.current().draft_kind == "standalone"

    def need_topk(self) -> bool:
        return True

    def carries_draft_hidden_states(self) -> bool:
        return self.is_eagle()

    def create_future_map(self, *args: Any, **kwargs: Any) -> Any:
        # The built-in enum's function only hands `self` on to the map.
        return SpeculativeAlgorithm.create_future_map(self, *args, **kwargs)

    def handle_server_args(self, server_args: Any) -> None:
        finish_server_args(server_args)


def register() -> None:
    """Register the algorithm; a second call in one process changes nothing."""
    from sglang.srt.speculative.spec_registry import get_spec

    if get_spec(NAME) is not None:
        return

    @SpeculativeAlgorithm.register(
        NAME,
        supports_overlap=False,
        validate_server_args=refuse_unsupported,
        spec_class=TetrisAlgorithm,
    )
    def create_worker(server_args: Any) -> type:
        from sglang_tetris.adapter.worker import TetrisWorker

        return TetrisWorker
