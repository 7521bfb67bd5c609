"""Runs servers against arrivals until enough has been seen.

Closed loop: so many requests are always in flight, a new one begins when one ends.
Open loop: requests arrive as a Poisson process, whatever the servers do. A router gives
each arrival to one of several independent servers, in turn or to the least loaded. All
policies see the same requests in the same order.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sglang_tetris.simulator.forests import Recording
from sglang_tetris.simulator.server import Server
from sglang_tetris.simulator.totals import RoundTotals

Router = Literal["round-robin", "least-loaded"]
ROUTERS: tuple[Router, ...] = ("round-robin", "least-loaded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How requests come.

    concurrency  closed loop: requests in flight, all servers together
    rate         open loop: requests per second; one of the two is None
    """

    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError(
                "exactly one of concurrency and rate must be given, got "
                f"{self.concurrency} and {self.rate}"
            )


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Sums of every server, and the latency in seconds of each finished request."""

    totals: Sequence[RoundTotals]
    latencies_s: list[float] = field(default_factory=list)
    seconds_per_token: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """After the warm-up, all servers together."""
        return sum(total.steady.tokens_per_s for total in self.totals)

    @property
    def tokens_per_s_from_start(self) -> float:
        return sum(total.tokens_per_s for total in self.totals)


def run(
    recording: Recording,
    servers: Sequence[Server],
    arrivals: Arrivals,
    *,
    router: Router = "round-robin",
    min_rounds: int,
    min_tokens: int,
    seed: int,
) -> Outcome:
    """Run until every server has done enough after its warm-up, or the arrivals end.

    min_rounds, min_tokens  what is enough, per server
    """
    rng = np.random.default_rng(seed)
    order = _endless(recording.num_requests, rng)
    gaps = _gaps(arrivals.rate, np.random.default_rng(seed + 1))
    outcome = Outcome(totals=[server.totals for server in servers])
    choose = _router(router, servers)
    started: dict[int, tuple[float, int]] = {}
    ready: list[tuple[float, int]] = []  # servers with work, by their time

    def arrive(now: float, *, skip: bool = False) -> None:
        request = next(order)
        length = int(np.diff(recording.row_starts)[request])
        skipped = int(rng.integers(0, length)) if skip else 0
        number = len(started)
        started[number] = (now, length - skipped)
        chosen = choose()
        if servers[chosen].num_requests == 0:
            servers[chosen].now = max(servers[chosen].now, now)
            heapq.heappush(ready, (servers[chosen].now, chosen))
        servers[chosen].accept(number, request, skipped=skipped)

    # Requests in flight from the start are at any point of their text, as later ones.
    for _ in range(arrivals.concurrency or 0):
        arrive(0.0, skip=True)
    next_arrival = next(gaps)
    while not all(_enough(total, min_rounds, min_tokens) for total in outcome.totals):
        if not ready or next_arrival <= ready[0][0]:
            arrive(next_arrival)
            next_arrival += next(gaps)
            continue
        _, index = heapq.heappop(ready)
        server = servers[index]
        finished = server.run_round()
        for number in finished:
            begun, tokens = started[number]
            outcome.latencies_s.append(server.now - begun)
            outcome.seconds_per_token.append((server.now - begun) / tokens)
        if server.num_requests:
            heapq.heappush(ready, (server.now, index))
        if arrivals.concurrency is not None:
            for _ in finished:
                arrive(server.now)
    return outcome


def _enough(total: RoundTotals, min_rounds: int, min_tokens: int) -> bool:
    steady = total.steady
    return steady.num_rounds >= min_rounds and steady.num_tokens >= min_tokens


def _endless(num_requests: int, rng: np.random.Generator) -> Iterator[int]:
    """Every request once, in random order, again and again."""
    while True:
        yield from rng.permutation(num_requests).tolist()


def _gaps(rate: float | None, rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield float("inf") if rate is None else float(rng.exponential(1 / rate))


def _router(router: Router, servers: Sequence[Server]) -> Callable[[], int]:
    turn = 0

    def in_turn() -> int:
        nonlocal turn
        turn += 1
        return (turn - 1) % len(servers)

    def least_loaded() -> int:
        return min(range(len(servers)), key=lambda index: servers[index].num_requests)

    return in_turn if router == "round-robin" else least_loaded
