"""What a step takes beside the target's forward: finer than a stopwatch.

    python benchmark/serving/host_time.py [--rounds 2] [--concurrency 1 4 16]

On a machine that is shared with others two starts of one server differ by ten per cent,
nearly all of it inside the target's forward, which is the same code over the same rows
in all of these arms: no speculation, TETRIS told to draft nothing, and TETRIS auto with
a scrambled draft. So the forward is timed apart, by a hook that a plugin made for this
run sets, and arms are compared by what is left of a step:

    host        from the end of a plain decode step's forward to the next one's start
    over_plain  an undrafted step relative to one of no speculation, as if both had the
                same forward: (1 + host / forward) over the same of no speculation
    probing     what drafted steps took beyond undrafted ones, as a share of the time

Medians over the steps at one batch size, the first of them left out; one server at a
time, arms in turn within a round; the median over rounds, with the least and the most.
On an accelerator a forward returns before it has ended, so this is for the CPU. Writes
results/host_time.json.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pace import answer, write
from run import write_dataset
from sglang_tetris.tools.arms import PLAIN, TETRIS_SCRAMBLED, TETRIS_UNDRAFTED, make_arm
from sglang_tetris.tools.prepare_model import PreparedModels, prepare
from sglang_tetris.tools.provenance import provenance, utc_now
from sglang_tetris.tools.server_process import (
    ServerError,
    exit_on_signals,
    running_server,
)

ARMS = (PLAIN, TETRIS_UNDRAFTED, TETRIS_SCRAMBLED)
NUM_TOKENS, NUM_SKIPPED = 400, 100
OUTPUT = "HOST_TIME_OUTPUT"
PLUGIN = """\
import json, os, time

steps = []


def timed(original, runner, batch, *args, **kwargs):
    begun = time.perf_counter()
    output = original(runner, batch, *args, **kwargs)
    if not runner.is_draft_worker:
        mode = batch.forward_mode.name
        steps.append((mode, batch.batch_size, begun, time.perf_counter()))
        if len(steps) >= 50:
            with open(os.environ["HOST_TIME_OUTPUT"], "a") as file:
                file.writelines(json.dumps(step) + "\\n" for step in steps)
            steps.clear()
    return output


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
    HookRegistry.register(target, timed, HookType.AROUND)
"""


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; 0, or 1 after a message on standard error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 1, 4])
    options = parser.parse_args(arguments)
    exit_on_signals()
    origin = provenance()
    models = prepare()
    found = []
    try:
        with tempfile.TemporaryDirectory() as folder, plugged_in(Path(folder)):
            for turn in range(options.rounds):
                first = turn % len(ARMS)
                for arm in ARMS[first:] + ARMS[:first]:
                    steps = measure(arm, models, Path(folder), options.concurrency)
                    for size in options.concurrency:
                        row = {"round": turn, "arm": arm, "concurrency": size}
                        found.append(row | step_times(steps, size))
    except KeyboardInterrupt:
        return 130
    except (ServerError, OSError) as error:
        print(f"host_time: {error}", file=sys.stderr)
        return 1
    origin["finished"] = utc_now()
    rows = summarise(found)
    show(rows)
    write("host_time", origin, options, summary=rows, rounds=found)
    return 0


@contextmanager
def plugged_in(folder: Path) -> Iterator[None]:
    """Let servers find the plugin, by an entry point in a folder of their path."""
    (folder / "host_time_plugin.py").write_text(PLUGIN, encoding="utf-8")
    info = folder / "host_time_plugin-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: host-time-plugin\nVersion: 0\n")
    entry = "[sglang.srt.plugins]\nhost_time = host_time_plugin:register\n"
    (info / "entry_points.txt").write_text(entry)
    before = os.environ.get("PYTHONPATH")
    path = [str(folder), *([before] if before else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def measure(
    arm: str, models: PreparedModels, folder: Path, concurrencies: list[int]
) -> list[tuple]:
    """Return (mode, requests, begin, end) of the target's forwards, in order."""
    path = folder / "steps.jsonl"
    path.unlink(missing_ok=True)
    os.environ[OUTPUT] = str(path)
    prompts = write_dataset(models.target, folder / "prompts.jsonl")
    flags = make_arm(arm, models).flags
    with running_server(flags, log_path=folder / "server.log") as server:
        for size in concurrencies:
            with ThreadPoolExecutor(size) as pool:
                texts = prompts[:size]
                list(pool.map(lambda t: answer(server.url, t, NUM_TOKENS), texts))
    lines = path.read_text(encoding="utf-8").splitlines()
    return [tuple(json.loads(line)) for line in lines]


def step_times(steps: list[tuple], size: int) -> dict[str, float]:
    """Return medians in milliseconds, and what drafted steps took beyond undrafted.

    Every step counts that no prompt and no change of the batch followed.
    """
    here = [
        (step, after)
        for step, after in pairwise(steps)
        if step[1] == after[1] == size and "EXTEND" not in (step[0], after[0])
    ][NUM_SKIPPED:]
    plain, others = [], []
    for pair in here:
        modes = {step[0] for step in pair}
        (plain if modes == {"DECODE"} else others).append(pair)
    usual_s = statistics.median(after[2] - step[2] for step, after in plain)
    # The draft runs before the forward that verifies, and reads after it.
    more_s = sum(after[2] - step[2] - usual_s for step, after in others)
    forward = statistics.median(step[3] - step[2] for step, _ in plain)
    return {
        "forward_ms": 1e3 * forward,
        "host_ms": 1e3 * statistics.median(after[2] - step[3] for step, after in plain),
        "drafted": sum(step[0] != "DECODE" for step, _ in here) / len(here),
        "probing": more_s / (usual_s * len(here)),
    }


def summarise(found: list[dict]) -> list[dict[str, object]]:
    """Return per concurrency and arm what it adds to a step of no speculation."""

    def step(row: dict) -> float:
        return 1.0 + row["host_ms"] / row["forward_ms"]

    plain = {(r["round"], r["concurrency"]): r for r in found if r["arm"] == PLAIN}
    rows = []
    for size in sorted({row["concurrency"] for row in found}):
        for arm in ARMS:
            own = [r for r in found if (r["arm"], r["concurrency"]) == (arm, size)]
            ratios = [step(row) / step(plain[row["round"], size]) for row in own]
            middle = {
                name: statistics.median(row[name] for row in own)
                for name in ("forward_ms", "host_ms", "drafted", "probing")
            }
            rows.append(
                {
                    "concurrency": size,
                    "arm": arm,
                    **middle,
                    "over_plain": statistics.median(ratios),
                    "range": [min(ratios), max(ratios)],
                }
            )
    return rows


def show(rows: list[dict]) -> None:
    """Print the summary."""
    table = Table(title="a step beside the target's forward")
    names = "at once", "arm", "forward ms", "host ms", "step over plain"
    for name in (*names, "drafted", "probing"):
        table.add_column(name, no_wrap=True)
    for row in rows:
        low, high = row["range"]
        table.add_row(
            str(row["concurrency"]),
            row["arm"],
            f"{row['forward_ms']:.2f}",
            f"{row['host_ms']:.2f}",
            f"{row['over_plain']:.3f} [{low:.3f}, {high:.3f}]",
            f"{row['drafted']:.1%}",
            f"{row['probing']:.1%}",
        )
    # A pipe or a log file has no width; 80 columns would cut the table.
    Console(width=None if sys.stdout.isatty() else 110).print(table)


if __name__ == "__main__":
    sys.exit(main())
