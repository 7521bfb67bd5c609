"""Times the parts of a round, for the cost of the next ones.

A lap ends where the host has just waited for the device, or works on a CPU, so that
wall clock is the part's own time. What lies between two rounds is measured as well,
unless a prompt step or an idle scheduler came in between.
"""

import time
from typing import NamedTuple

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

    def start(self) -> None:
        """Begin a round, and close the gap since the one before."""
        now = time.perf_counter()
        if self._previous is not None:
            own_s, load = self._previous
            gap = now - self._started - own_s
            if gap > 0:
                self._add("outside", load, load.batch_size, gap)
        self._started = self._last = now

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
