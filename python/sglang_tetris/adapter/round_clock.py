"""Times the parts of a round, for the cost of the next ones.

A lap ends where the host has just waited for the device, or works on a CPU, so that
wall clock is the part's own time. What lies between two rounds is measured as well,
unless a prompt step or an idle scheduler came in between. Nobody waits for the device
in a prompt step, so there its own events are asked, when the next round begins.
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
    """Collects the laps of rounds until they are taken.

    waits: whether the device works beside the host. Then the target's forward and the
    sampling are one lap, since the host waits for both together.
    """

    def __init__(self, *, waits: bool) -> None:
        self.laps: list[Lap] = []
        self._waits = waits
        self._started = self._last = 0.0
        self._own = 0.0
        self._previous: tuple[float, Load] | None = None
        self._forward = ("verify", 0)
        # Parts of prompt steps that the device may not have ended yet.
        self._begun: Any = None
        self._pending: list[tuple[Lap, Any, Any]] = []

    def start(self) -> None:
        """Begin a round, and close the gap since the one before."""
        now = time.perf_counter()
        if self._previous is not None:
            own_s, load = self._previous
            gap = now - self._started - own_s
            if gap > 0:
                self._add("outside", load, load.batch_size, gap)
        self._started = self._last = now
        self._own = 0.0
        self._take_prompts()

    def lap(self, phase: str, load: Load, *, tokens: int, times: int = 1) -> None:
        """End a part, of `times` equal pieces, that began where the last one ended."""
        if self._waits and phase in ("verify", "decode"):
            self._forward = (phase, tokens)
            return
        if self._waits and phase.startswith("sample_"):
            phase, tokens = self._forward
        now = time.perf_counter()
        if tokens:
            self._add(phase, load, tokens, (now - self._last) / times)
            self._own += now - self._last
        self._last = now

    def start_prompts(self) -> None:
        """Begin a prompt step: no gap between rounds is measured across it."""
        self.interrupted()
        self._last = time.perf_counter()
        if self._waits:
            self._begun = _mark()

    def lap_prompts(self, phase: str, load: Load, *, tokens: int) -> None:
        """End a part of a prompt step that began where the last one ended."""
        if not self._waits:
            self.lap(phase, load, tokens=tokens)
            return
        ended, begun = _mark(), self._begun
        lap = Lap(phase, tokens, load.batch_size, load.total_kv_tokens, 0.0)
        self._pending.append((lap, begun, ended))
        self._begun = ended

    def take(self) -> list[Lap]:
        """Return the laps since the last call."""
        laps, self.laps = self.laps, []
        return laps

    def skip(self) -> None:
        """Let the next lap begin now."""
        self._last = time.perf_counter()

    def end(self, load: Load) -> None:
        """End the round; the time up to the next start belongs to no part of it."""
        self._previous = (self._own, load)
        self._own = 0.0

    def interrupted(self) -> None:
        """Say that something else ran since the last round."""
        self._previous = None

    def _take_prompts(self) -> None:
        """Turn what the device has ended by now into laps; the rest is given up."""
        for lap, begun, ended in self._pending:
            if ended.query():
                time_s = begun.elapsed_time(ended) / 1000
                self.laps.append(lap._replace(time_s=time_s))
        self._pending = []

    def _add(self, phase: str, load: Load, tokens: int, time_s: float) -> None:
        self.laps.append(
            Lap(
                phase=phase,
                tokens=tokens,
                batch_size=load.batch_size,
                total_kv_tokens=load.total_kv_tokens,
                time_s=time_s,
            )
        )


def _mark() -> Any:
    """Return an event at this place of the device's queue."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
