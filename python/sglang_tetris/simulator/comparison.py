"""Policies side by side: tokens per second by concurrency, and drafts by budget.

    simulate         one policy at one load with one cost table
    compare_budgets  correct drafts per round at equal budgets; no costs in it

All policies replay the same requests in the same order. A speed is that of the rounds
after the warm-up; the one that includes it is kept beside it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_tetris.core.cost_table import CostTable
from sglang_tetris.simulator.calibrator import Calibration
from sglang_tetris.simulator.clock import Clock
from sglang_tetris.simulator.driver import Arrivals, Outcome, Router, run
from sglang_tetris.simulator.forests import Recording
from sglang_tetris.simulator.policies.catalog import BASELINES, Catalog
from sglang_tetris.simulator.server import Server

_REQUEST_ROUNDS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is simulated after the warm-up of 200 rounds, per server.

    At least the whole recording, and so many rounds: `most_rounds`, fewer where many
    requests run at once, but never below `least_rounds`. Prompts that happen to be read
    together, or not, are most of the noise; it is largest at 32 to 128 requests.
    """

    least_rounds: int = 1000
    most_rounds: int = 3000
    seed: int = 0

    def num_rounds(self, concurrency: int) -> int:
        """Return the rounds for so many requests at once."""
        wanted = max(_REQUEST_ROUNDS // concurrency, self.least_rounds)
        return min(wanted, self.most_rounds)


def simulate(
    recording: Recording,
    table: CostTable,
    policy: str,
    arrivals: Arrivals,
    *,
    make_calibrator: Callable[[], Calibration],
    effort: Effort,
    replicas: int = 1,
    capacity: int = 1_000_000,
    router: Router = "round-robin",
) -> Outcome:
    """Run one policy, a fresh one on each replica."""
    catalog, clock = Catalog(recording, table, make_calibrator), Clock(table)
    servers = [
        Server(
            recording,
            clock,
            catalog.make(policy),
            capacity=capacity,
            rng=np.random.default_rng(effort.seed + index),
        )
        for index in range(replicas)
    ]
    return run(
        recording,
        servers,
        arrivals,
        router=router,
        min_rounds=effort.num_rounds((arrivals.concurrency or capacity) // replicas),
        min_tokens=recording.num_tokens // replicas,
        seed=effort.seed,
    )


def speed_row(policy: str, arrivals: Arrivals, outcome: Outcome) -> dict[str, Any]:
    """Return a run's numbers as JSON values; those per round are of one server.

    load is requests in flight, or arrivals per second where `is_open`. A request's
    tokens_per_s are over its whole stay, waiting and prompt included; all others are
    over the time in which a server is busy.
    """
    steady = outcome.totals[0].steady
    tokens = sum(total.steady.num_tokens for total in outcome.totals)
    return {
        "policy": policy,
        "load": arrivals.concurrency or arrivals.rate,
        "is_open": arrivals.rate is not None,
        "tokens_per_s": outcome.tokens_per_s,
        "tokens_per_s_from_start": outcome.tokens_per_s_from_start,
        "tokens": tokens,
        "rounds": steady.num_rounds,
        "correct_per_round": steady.correct_per_round,
        "verified_per_round": steady.verified_per_round,
        "prompt_share": steady.prompt_share,
        "depths": {str(d): n for d, n in sorted(steady.depths.items())},
        "reasons": dict(steady.reasons),
        "request_tokens_per_s": 1 / float(np.mean(outcome.seconds_per_token)),
        "latency_p99_s": float(np.quantile(outcome.latencies_s, 0.99)),
    }


def against_baselines(
    rows: Sequence[dict[str, Any]], subject: str
) -> list[dict[str, Any]]:
    """Return, by load, the best baseline and the subject's speed relative to it.

    In steady state, and with the start, against the baseline that is best there. In a
    closed loop the speed is that of all requests together, in an open one a request's.
    """
    found = []
    for load in dict.fromkeys(row["load"] for row in rows):
        here = {row["policy"]: row for row in rows if row["load"] == load}
        known = [name for name in BASELINES if name in here]
        if not known or subject not in here:
            continue
        entry: dict[str, Any] = {"load": load}
        keys = ("tokens_per_s_from_start", "tokens_per_s")
        if here[subject]["is_open"]:
            keys = ("request_tokens_per_s",) * 2
        for key, ratio in zip(keys, ("ratio_from_start", "ratio"), strict=True):
            best = max(known, key=lambda name: float(here[name][key]))
            entry |= {"best": best, "best_tokens_per_s": here[best][key]}
            entry[ratio] = here[subject][key] / here[best][key]
        found.append(entry)
    return found


def compare_budgets(
    recording: Recording,
    table: CostTable,
    budgets: Sequence[int],
    concurrency: int,
    *,
    make_calibrator: Callable[[], Calibration],
    effort: Effort,
) -> list[dict[str, Any]]:
    """Return correct drafts per round and request at k drafts per request.

    `closed` is the share of the gap between fixed k and the oracle at that budget;
    `over_paper` the gain over the better of the paper's two extras.
    """
    found = []
    for k in budgets:
        names = {
            f"fixed-{k}": "fixed",
            f"paper-{k}+1": "paper",
            f"paper-{k}+2": "paper",
            f"ours-{k}x-chains": "ours",
            f"ours-{k}x-trees": "ours",
            f"oracle-{k}x": "oracle",
        }
        correct = {}
        for name in names:
            outcome = simulate(
                recording,
                table,
                name,
                Arrivals(concurrency=concurrency),
                make_calibrator=make_calibrator,
                effort=effort,
            )
            correct[name] = outcome.totals[0].steady.correct_per_round / concurrency
        low, high = correct[f"fixed-{k}"], correct[f"oracle-{k}x"]
        paper = max(correct[name] for name, kind in names.items() if kind == "paper")
        found += [
            {
                "budget": k,
                "policy": name,
                "correct_per_request_round": value,
                "closed": (value - low) / (high - low),
                "over_paper": value / paper - 1,
            }
            for name, value in correct.items()
        ]
    return found
