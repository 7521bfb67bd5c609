"""A server for profile_cost that runs nothing: its rounds take what a table says."""

import io
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from sglang_tetris.core.cost_table import PHASES, CostSample, CostTable
from sglang_tetris.tools.server_process import ServerError

TRUE = CostTable(
    token_knots=(1, 8, 64),
    knot_times_s=(0.010, 0.012, 0.050),
    per_request_s=0.0004,
    per_kv_token_s=2e-6,
)
TRUE = replace(
    TRUE,
    phases={
        name: replace(TRUE, knot_times_s=tuple(place * t for t in TRUE.knot_times_s))
        for place, name in enumerate(PHASES, 2)
    },
)


def part(name: str) -> CostTable:
    return TRUE if name == "verify" else TRUE.phases[name]


def sample(table: CostTable, tokens: int, batch_size: int, kv: int) -> CostSample:
    time_s = table.step_time_s(
        total_verify_tokens=tokens, batch_size=batch_size, total_kv_tokens=kv
    )
    return CostSample(tokens, batch_size, kv, time_s)


class FakeServer:
    """Answers what profile_cost asks; a request is one round of all that run."""

    url = "http://fake"

    def __init__(self) -> None:
        self.flags: tuple[str, ...] = ()
        self.budgets: list[str] = []
        self.dies_after = self.refuses_after = 10**9
        self.is_silent = False
        self._num_rounds = self._running = 0
        self._lock, self._over = threading.Lock(), threading.Event()

    @contextmanager
    def start(self, flags: tuple[str, ...], *, log_path: Path) -> Iterator[object]:
        self.flags = flags
        self._trace = Path(flags[flags.index("--tetris-trace") + 1])
        self._trace.write_text('{"format": "a header"}\n')
        yield self

    def check_running(self) -> None:
        if self._num_rounds > self.dies_after:
            raise ServerError("The server ended with status -9.")

    def urlopen(self, request: urllib.request.Request, timeout: float) -> io.BytesIO:
        if self._num_rounds > self.dies_after:
            raise urllib.error.URLError(ConnectionRefusedError(111, "refused"))
        route, body = request.full_url.removeprefix(self.url), json.loads(request.data)
        if route == "/tetris/budget":
            self.budgets.append(body["draft_budget"])
        elif route == "/abort_request":
            self._over.set()
        elif route == "/generate":
            self._generate(request, body["sampling_params"])
        else:
            raise AssertionError(route)
        return io.BytesIO(b"{}")

    def _generate(self, request: urllib.request.Request, params: dict) -> None:
        if self.is_silent:
            self._over.wait(10)
        with self._lock:
            self._num_rounds += 1
            self._running += 1
            if self._num_rounds > self.refuses_after:
                raise urllib.error.HTTPError(
                    request.full_url, 400, "Bad Request", None, None
                )
            self._write_round(self._running, params)
        time.sleep(0.002)
        with self._lock:
            self._running -= 1

    def _write_round(self, size: int, params: dict) -> None:
        # Until told otherwise, the flags' own.
        budget = self.budgets[-1] if self.budgets else "0"
        drafts = int(budget.rstrip("x")) * (size if "x" in budget else 1)
        kind = ("multinomial", "sorted")["top_p" in params]
        kind = kind if params["temperature"] else "greedy"
        kv = 100 * size + 37 * self._num_rounds % 500
        rows = {"outside": size, "prompt": 40, f"sample_{kind}": size + drafts}
        rows |= {"draft_step": size, "draft_extend": 2 * size} if drafts else {}
        rows |= {"verify": size + drafts} if drafts else {"decode": size}
        laps = [
            (name, *sample(part(name), tokens, size, kv))
            for name, tokens in rows.items()
        ]
        # A part that was not timed.
        laps.append(("decode", 1, 1, 1, 0.0))
        with self._trace.open("a") as file:
            file.write(json.dumps({"laps": laps}) + "\n")
