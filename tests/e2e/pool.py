"""Servers shared by the tests of a session, and the oracle they are compared with.

Starting a server costs more than most tests, so each set of flags is started once,
kept while there is room, and asked again. What plain decoding answered is remembered,
so that the plain server need not stay.
"""

import contextlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e import servers
from tests.e2e.servers import Server

# A server holds about 2.5 GB; more of them alive would not fit a small machine, where
# two workers may have as many each.
MAX_ALIVE = 3
MIN_AVAILABLE_BYTES = 5 * 2**30
# The oracle of every comparison, see README: stock SGLang counts penalties one token
# late under overlap.
PLAIN = ("--disable-overlap-schedule",)
# Two best logits nearer than this can change places by rounding alone.
ROUNDING_GAP = 1e-3


class ServerPool:
    """Starts servers on demand, at most MAX_ALIVE at a time, oldest use ends first."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._alive: OrderedDict[tuple[Any, ...], Server] = OrderedDict()
        self._answers: dict[str, Any] = {}

    def get(
        self,
        model: Path | str,
        flags: Sequence[str] = (),
        env: dict[str, str] | None = None,
    ) -> Server:
        """Return a running server with these flags, its prefix cache empty."""
        key = (str(model), tuple(flags), tuple(sorted((env or {}).items())))
        if key in self._alive and self._alive[key].process.poll() is None:
            self._alive.move_to_end(key)
            server = self._alive[key]
            server.flush_cache()
            return server
        self._alive.pop(key, None)
        while len(self._alive) >= MAX_ALIVE or (self._alive and _is_short_of_memory()):
            servers.stop_server(self._alive.popitem(last=False)[1])
        server = servers.start_server(model, flags, log_dir=self._log_dir, env=env)
        self._alive[key] = server
        return server

    def plain(
        self,
        model: Path | str,
        prompts: Sequence[Sequence[int]],
        flags: Sequence[str] = (),
        **sampling_params: Any,
    ) -> list[list[int]]:
        """Return what plain decoding emits, asked once per session."""
        asked = [str(model), [list(p) for p in prompts], list(flags), sampling_params]
        key = json.dumps(asked, sort_keys=True, default=str)
        if key not in self._answers:
            server = self.get(model, (*PLAIN, *flags))
            replies = server.generate(prompts, **sampling_params)
            self._answers[key] = [reply["output_ids"] for reply in replies]
        return self._answers[key]

    def close(self) -> None:
        for server in self._alive.values():
            with contextlib.suppress(Exception):
                servers.stop_server(server)
        self._alive.clear()


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    shared = ServerPool(tmp_path_factory.mktemp("server-logs"))
    yield shared
    shared.close()


def _is_short_of_memory() -> bool:
    return psutil.virtual_memory().available < MIN_AVAILABLE_BYTES


def tetris_flags(
    draft: Path | str, *, steps: int = 3, topk: int = 1, width: int | None = None
) -> tuple[str, ...]:
    """Return the flags of a TETRIS server; width counts the anchor."""
    width = steps * topk + 1 if width is None else width
    return (
        *("--speculative-algorithm", "TETRIS"),
        *("--speculative-draft-model-path", str(draft)),
        *("--speculative-num-steps", str(steps)),
        *("--speculative-eagle-topk", str(topk)),
        *("--speculative-num-draft-tokens", str(width)),
        "--enable-metrics",
        *("--decode-log-interval", "5"),
    )


def set_budget(server: Server, budget: str) -> None:
    """Change the budget of a running server and see that it took effect."""
    reply = server.post("/tetris/budget", {"draft_budget": budget})
    assert reply == {"draft_budget": budget, "updated": True}
    assert tetris_info(server)["draft_budget"] == budget


def tetris_info(server: Server) -> dict[str, Any]:
    """Return the TETRIS part of /server_info."""
    return server.server_info()["internal_states"][0]["tetris"]


def assert_same_tokens(
    got: Sequence[Sequence[int]],
    wanted: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    plain: Server | None = None,
) -> None:
    """Compare answers token for token, up to a first difference that is rounding.

    A difference counts as rounding only where plain decoding's two best logits at that
    token are shown to lie within ROUNDING_GAP; without a plain server none is excused.
    """
    for prompt, mine, oracle in zip(prompts, got, wanted, strict=True):
        if list(mine) == list(oracle):
            continue
        at = next(
            (i for i, (a, b) in enumerate(zip(mine, oracle, strict=False)) if a != b),
            min(len(mine), len(oracle)),
        )
        gap = None
        if plain is not None and at < min(len(mine), len(oracle)):
            gap = logit_gap(plain, [*prompt, *oracle[:at]])
        excused = gap is not None and gap <= ROUNDING_GAP
        assert excused, (
            f"token {at} differs: {mine[at : at + 4]} instead of "
            f"{oracle[at : at + 4]}; two best logits apart by {gap}"
        )


def logit_gap(plain: Server, input_ids: Sequence[int]) -> float:
    """Return how far the two best logits of the next token lie apart."""
    (reply,) = plain.generate(
        [input_ids],
        max_new_tokens=1,
        request={"return_logprob": True, "top_logprobs_num": 2},
    )
    best, second = reply["meta_info"]["output_top_logprobs"][0]
    return best[0] - second[0]
