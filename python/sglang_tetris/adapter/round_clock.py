"""Times the parts of a round, for the cost of the next ones.

On a CPU a lap is wall clock. What lies between two rounds is measured as well, unless a
prompt step came in between. A device works beside the host, which runs ahead of it: so
there the device's own events are asked, once the host has waited for it in any case,
and what is left of the wall clock between two such waits lies outside of the parts.
"""

import time
from typing import Any, NamedTuple

import torch

from sglang_tetris.core.auto_policy import Load


class Lap(NamedTuple):
    """One measured part; `phase` is a name of core.round_cost."""

    phase: str
    tokens: int
    batch_size: int
    total_kv_tokens: int
    time_s: float


class RoundClock:
    """Collects the laps of rounds until they are taken, by wall clock."""

    def __init__(self) -> None:
        self.laps: list[Lap] = []
        self._started = self._last = 0.0
        self._own = 0.0
        self._previous: tuple[float, Load] | None = None

    def start(self) -> None:
        """Begin a round, and close the gap since the one before."""
        now = time.perf_counter()
        if self._previous is not None:
            own_s, load = self._previous
            self._add("outside", load, load.batch_size, now - self._started - own_s)
        self._started = self._last = now
        self._own = 0.0

    def lap(self, phase: str, load: Load, *, tokens: int, times: int = 1) -> None:
        """End a part, of `times` equal pieces, that began where the last one ended."""
        now = time.perf_counter()
        if tokens:
            self._add(phase, load, tokens, (now - self._last) / times)
            self._own += now - self._last
        self._last = now

    def start_prompts(self) -> None:
        """Begin a prompt step: no gap between rounds is measured across it."""
        self._previous = None
        self._last = time.perf_counter()

    def take(self) -> list[Lap]:
        """Return the laps since the last call; the host has just waited for them."""
        laps, self.laps = self.laps, []
        return laps

    def skip(self) -> None:
        """Let the next lap begin now."""
        self._last = time.perf_counter()

    def end(self, load: Load) -> None:
        """End the round; the time up to the next start belongs to no part of it."""
        self._previous = (self._own, load)
        self._own = 0.0

    def _add(self, phase: str, load: Load, tokens: int, time_s: float) -> None:
        if time_s > 0:
            kv_tokens = load.total_kv_tokens
            self.laps.append(Lap(phase, tokens, load.batch_size, kv_tokens, time_s))


class DeviceClock(RoundClock):
    """Asks the device's events instead; see the module."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: Any = None
        # Parts with their pieces, and the events around them.
        self._parts: list[tuple[str, Load, int, int, Any, Any]] = []
        # When the host last waited, unless a prompt step came in since.
        self._waited: float | None = None
        self._load: Load | None = None

    def start(self) -> None:
        self._begun = _mark()

    def lap(self, phase: str, load: Load, *, tokens: int, times: int = 1) -> None:
        ended = _mark()
        if tokens:
            self._parts.append((phase, load, tokens, times, self._begun, ended))
        self._begun = ended

    def start_prompts(self) -> None:
        self._waited = None
        self._begun = _mark()

    def take(self) -> list[Lap]:
        now, device_s = time.perf_counter(), 0.0
        running = []
        for part in self._parts:
            phase, load, tokens, times, begun, ended = part
            if not ended.query():
                running.append(part)
                continue
            part_s = begun.elapsed_time(ended) / 1000
            device_s += part_s
            self._add(phase, load, tokens, part_s / times)
        self._parts = running
        if self._waited is not None and self._load is not None and not running:
            left_s = now - self._waited - device_s
            self._add("outside", self._load, self._load.batch_size, left_s)
        self._waited = now
        return super().take()

    def skip(self) -> None:
        self._begun = _mark()

    def end(self, load: Load) -> None:
        self._load = load


def _mark() -> Any:
    """Return an event at this place of the device's queue."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
