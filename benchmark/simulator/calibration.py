"""How true the accept probabilities are, on a recording: raw and calibrated.

    python benchmark/simulator/calibration.py [TRACE] [--output RESULT.json]

A server is replayed: 16 requests at once, two drafts per request verified, those of the
best calibrated survival. It learns from what was verified, as a running one does. What
it is judged by are all drafts whose parent is part of the text, verified or not,
judged before their round is learnt from:

    online       every round of the recording
    new prompts  one half of the requests taught the map, then it stays as it is, and
                 the rounds of the other half are judged

Errors are core.calibration_error's: debiased, 15 bins of equal mass; intervals resample
whole requests. Prints a table; with `--output`, writes JSON with its provenance.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from sglang_tetris.core.auto_policy import Load, RoundPlan
from sglang_tetris.core.calibration_error import (
    bootstrap_interval,
    brier_score,
    debiased_calibration_error,
)
from sglang_tetris.core.cost_table import CostTable
from sglang_tetris.core.replay import read_replay
from sglang_tetris.simulator.calibrator import LearntCalibration
from sglang_tetris.simulator.clock import Clock
from sglang_tetris.simulator.driver import Arrivals, run
from sglang_tetris.simulator.forests import Recording
from sglang_tetris.simulator.policies.base import FinishedRound
from sglang_tetris.simulator.policies.budgeted import Budgeted
from sglang_tetris.simulator.server import Server
from sglang_tetris.simulator.trees import Choice, RoundTrees
from sglang_tetris.tools.provenance import provenance, sha256_of, utc_now

HERE = Path(__file__).parent
TRACE = HERE / "traces/smollm2-135m.replay.jsonl.gz"
TREES = 3  # branches, as recorded
CONCURRENCY, PER_REQUEST, NUM_BINS, RESAMPLES = 16, 2, 15, 500

Reals = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Judged(Budgeted):
    """The policy of the module; remembers what it thought of drafts that count.

    teaches, judges  [requests] bool: those that it learns from, and is judged by
    """

    def __init__(
        self,
        recording: Recording,
        learnt: LearntCalibration,
        *,
        teaches: Bools,
        judges: Bools,
    ) -> None:
        super().__init__(
            "judged",
            PER_REQUEST,
            topk=TREES,
            depth=recording.trees.max_depth,
            calibrator=learnt,
        )
        self._learnt, self._starts = learnt, recording.row_starts
        self._teaches, self._judges = teaches, judges
        self._probs = np.zeros((0, 0), np.float32)
        self.seen: list[tuple[Any, ...]] = []

    def choose(self, plan: RoundPlan, load: Load, trees: RoundTrees) -> Choice:
        self._probs = self._learnt.calibrate(trees)
        return trees.best(self._probs, PER_REQUEST * trees.num_requests)[0]

    def observe(self, finished: FinishedRound) -> None:
        trees = finished.trees
        # Beyond the end of the text nothing is known.
        counts = trees.is_compared & (trees.depths < trees.left[:, None])
        request = np.searchsorted(self._starts, trees.rows, side="right") - 1
        counts &= self._judges[request][:, None]
        which = np.broadcast_to(request[:, None], counts.shape)
        self.seen.append(
            tuple(
                values[counts]
                for values in (trees.probs, self._probs, trees.is_correct, which)
            )
        )
        teaching = finished.choice & self._teaches[request][:, None]
        self._learnt.update(trees, teaching)


def replay(recording: Recording, policy: Judged) -> None:
    """Run the policy over the recording once; what time passes does not matter."""
    server = Server(
        recording,
        Clock(CostTable(token_knots=(1, 2), knot_times_s=(0.01, 0.02))),
        policy,
        capacity=CONCURRENCY,
        rng=np.random.default_rng(0),
    )
    arrivals = Arrivals(concurrency=CONCURRENCY)
    least = recording.num_tokens
    run(recording, [server], arrivals, min_rounds=1, min_tokens=least, seed=0)


def errors(
    probs: Reals, correct: Bools, requests: Any, *, resamples: int = RESAMPLES
) -> dict[str, Any]:
    """Return Brier score, debiased error and its 95 % interval."""

    def with_bins(plug_in: bool) -> Callable[[Any], float]:
        def ece(places: Any) -> float:
            found = debiased_calibration_error(probs[places], correct[places], NUM_BINS)
            return found.plug_in_ece if plug_in else found.ece

        return ece

    low, high = bootstrap_interval(
        with_bins(False), requests, plug_in=with_bins(True), num_resamples=resamples
    )
    return {
        "brier": brier_score(probs, correct),
        "ece": debiased_calibration_error(probs, correct, NUM_BINS).ece,
        "ece_interval": [low, high],
    }


def judge(policy: Judged) -> dict[str, Any]:
    """Return both errors of what the policy has seen."""
    raw, calibrated, correct, requests = map(
        np.concatenate, zip(*policy.seen, strict=True)
    )
    return {
        "nodes": len(correct),
        "requests": len(np.unique(requests)),
        # Below 0: better. Requests are resampled, both at once.
        "brier_change_interval": bootstrap_interval(
            lambda places: (
                brier_score(calibrated[places], correct[places])
                - brier_score(raw[places], correct[places])
            ),
            requests,
            num_resamples=RESAMPLES,
        ),
        "raw": errors(raw.astype(np.float64), correct, requests),
        "calibrated": errors(calibrated.astype(np.float64), correct, requests),
    }


def main(arguments: list[str] | None = None) -> int:
    """Replay, judge, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path, nargs="?", default=TRACE)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    origin = provenance()
    read = read_replay(options.trace)
    # The trace has a default, which the command does not name.
    origin["sha256"] = sha256_of([options.trace])
    origin["recorded"] = dict(read.header.provenance)
    recording = Recording.from_replay(read)
    everyone = np.ones(recording.num_requests, np.bool_)
    half = np.arange(recording.num_requests) % 2 == 0
    online = Judged(recording, LearntCalibration(), teaches=everyone, judges=everyone)
    learnt = LearntCalibration()
    teaching = Judged(recording, learnt, teaches=half, judges=~everyone)
    frozen = Judged(recording, learnt, teaches=~everyone, judges=~half)
    for policy in (online, teaching, frozen):
        replay(recording, policy)
    result = {"online": judge(online), "new prompts": judge(frozen)}
    table = Table(title=f"Calibration on {options.trace.name}")
    header = ("rounds", "nodes", "probabilities", "error", "95 % interval", "Brier")
    for name in header:
        table.add_column(name)
    for name, found in result.items():
        for kind in ("raw", "calibrated"):
            own = found[kind]
            low, high = own["ece_interval"]
            table.add_row(
                name,
                str(found["nodes"]),
                kind,
                f"{own['ece']:.4f}",
                f"{low:.4f} to {high:.4f}",
                f"{own['brier']:.5f}",
            )
    Console().print(table)
    for name, found in result.items():
        low, high = found["brier_change_interval"]
        print(f"{name}: Brier score changed by {low:.5f} to {high:.5f}")
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        origin["finished"] = utc_now()
        record = {"provenance": origin, **result}
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
