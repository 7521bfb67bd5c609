"""How long a server takes to be ready, its processes forked and spawned in turn.

    python benchmark/serving/start_up.py [--rounds 3]

Seconds from the command to the first healthy answer, and the share of SGLang's time
(spawn) that a fork takes, in the same round. Writes results/start_up.json.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from sglang_tetris.adapter.cpu_device.process_start import START_METHOD
from sglang_tetris.tools.arms import TETRIS, make_arm
from sglang_tetris.tools.prepare_model import prepare
from sglang_tetris.tools.provenance import provenance, utc_now
from sglang_tetris.tools.server_process import exit_on_signals, running_server

RESULT = Path(__file__).resolve().parent / "results" / "start_up.json"


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    exit_on_signals()
    origin = provenance()
    flags = make_arm(TETRIS, prepare()).flags
    seconds: dict[str, list[float]] = {"fork": [], "spawn": []}
    with tempfile.TemporaryDirectory() as logs:
        for _ in range(options.rounds):
            for method, found in seconds.items():
                os.environ[START_METHOD] = method
                begin = time.perf_counter()
                with running_server(flags, log_path=Path(logs) / f"{method}.log"):
                    found.append(time.perf_counter() - begin)
                print(f"{method}: {found[-1]:.1f} s", flush=True)
    share = statistics.median(
        forked / spawned
        for forked, spawned in zip(seconds["fork"], seconds["spawn"], strict=True)
    )
    print(f"fork / spawn: {share:.2f} (median of {options.rounds} rounds)")
    origin["finished"] = utc_now()
    record = {"provenance": origin, "seconds": seconds, "fork_over_spawn": share}
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
