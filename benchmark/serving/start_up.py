"""How long a server takes to be ready, its processes forked and spawned in turn.

    python benchmark/serving/start_up.py [--rounds 3]

Prints seconds from the command to the first healthy answer, and the ratio.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from sglang_tetris.adapter.cpu_device.process_start import START_METHOD
from sglang_tetris.tools.arms import TETRIS, make_arm
from sglang_tetris.tools.prepare_model import prepare
from sglang_tetris.tools.server_process import exit_on_signals, running_server


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    exit_on_signals()
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
    ratio = statistics.median(
        spawned / forked
        for forked, spawned in zip(seconds["fork"], seconds["spawn"], strict=True)
    )
    print(f"spawn / fork: {ratio:.2f} (median of {options.rounds} rounds)")


if __name__ == "__main__":
    main()
