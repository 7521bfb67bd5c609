"""What a round costs under each arm, by turns of some seconds: finer than run.py.

    python benchmark/serving/pace.py [--turns 6] [--concurrency 1 4 16] [--arms ...]

By default the arms are those whose drafts are worth nothing: no speculation, with and
without overlap scheduling, TETRIS told to draft nothing, and TETRIS auto with a
scrambled draft, which finds that out. All servers are started first; from then on one
runs and the others are stopped (SIGSTOP), so that none takes processor time from
another. A turn of an arm answers N requests of 40 tokens at once; its pace is the time
per token after the first 8, when all prompts have been read, the median of its
requests. Arms are compared within a turn, with no speculation, since the machine
drifts. Of two alike servers the one that was started first is some per cent faster, and
any server is faster or slower than its own next start; so all are started as often as
there are arms, each arm once as the first, and what is shown is the geometric mean of
these starts' medians. Prompts are run.py's. Writes results/NAME.json.
"""

import argparse
import contextlib
import json
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from run import write_dataset
from sglang_tetris.tools.arms import ARM_NAMES, COST_ARM_NAMES, PLAIN, make_arm
from sglang_tetris.tools.prepare_model import PreparedModels, prepare
from sglang_tetris.tools.provenance import provenance, utc_now
from sglang_tetris.tools.server_process import (
    ServerError,
    ServerProcess,
    exit_on_signals,
    running_server,
)

RESULTS = Path(__file__).resolve().parent / "results"
NUM_TOKENS, NUM_SKIPPED = 40, 8
WARM_UP_TURNS = 3
RESAMPLES = 2000


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; 0, or 1 after a message on standard error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=6, help="of each start")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=(*ARM_NAMES, *COST_ARM_NAMES),
        default=[PLAIN, *COST_ARM_NAMES],
    )
    parser.add_argument("--name", default="pace", help="of the file in results/")
    options = parser.parse_args(arguments)
    if PLAIN not in options.arms:
        parser.error(f"--arms needs {PLAIN}, which the others are compared with")
    exit_on_signals()
    origin = provenance()
    models = prepare()
    paces = []
    try:
        for start in range(len(options.arms)):
            order = options.arms[start:] + options.arms[:start]
            with started(order, models) as (servers, prompts):
                found = measure(servers, prompts, options.concurrency, options.turns)
            paces += [{"start": start, **record} for record in found]
            print(f"start {start + 1} of {len(options.arms)} is done", flush=True)
    except KeyboardInterrupt:
        return 130
    except (ServerError, OSError) as error:
        print(f"pace: {error}", file=sys.stderr)
        return 1
    origin["finished"] = utc_now()
    rows = summarise(paces)
    show(rows)
    write(options.name, origin, options, summary=rows, ms_per_token=paces)
    return 0


def write(
    name: str, origin: dict[str, Any], options: argparse.Namespace, **found: Any
) -> None:
    """Write results/NAME.json: where it came from, and what was found."""
    record = {"provenance": origin, "settings": vars(options), **found}
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


@contextlib.contextmanager
def started(
    arms: list[str], models: PreparedModels
) -> Iterator[tuple[dict[str, ServerProcess], list[str]]]:
    """Start the arms' servers in this order, all held still; prompts beside them."""
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prompts = write_dataset(models.target, logs / "prompts.jsonl")
        servers = {}
        for name in arms:
            log_path = logs / f"{name}.log"
            flags = make_arm(name, models).flags
            server = stack.enter_context(running_server(flags, log_path=log_path))
            stack.enter_context(stopped(server))
            servers[name] = server
        yield servers, prompts


@contextlib.contextmanager
def stopped(server: ServerProcess) -> Iterator[None]:
    """Hold a server's processes still; at the end they run again, so as to be ended."""
    _signal(server, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(server, signal.SIGCONT)


@contextlib.contextmanager
def resumed(server: ServerProcess) -> Iterator[None]:
    """Let a stopped server run; at the end it is stopped again."""
    _signal(server, signal.SIGCONT)
    try:
        yield
    finally:
        _signal(server, signal.SIGSTOP)


def _signal(server: ServerProcess, number: signal.Signals) -> None:
    for process in server.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def measure(
    servers: dict[str, ServerProcess],
    prompts: list[str],
    concurrencies: list[int],
    turns: int,
) -> list[dict[str, object]]:
    """Return one record per concurrency and turn, with every arm's milliseconds."""
    names, records = list(servers), []
    for concurrency in concurrencies:
        for turn in range(-WARM_UP_TURNS, turns):
            found = {}
            begin = turn * concurrency
            texts = [prompts[(begin + i) % len(prompts)] for i in range(concurrency)]
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                with resumed(servers[name]):
                    found[name] = pace(servers[name].url, texts)
            if turn >= 0:
                records.append({"concurrency": concurrency, "turn": turn, **found})
        print(f"{concurrency} at once: {turns} turns", flush=True)
    return records


def pace(url: str, texts: list[str]) -> float:
    """Return milliseconds per token of requests that run together."""
    with ThreadPoolExecutor(len(texts)) as pool:
        return statistics.median(pool.map(lambda text: _request(url, text), texts))


def _request(url: str, text: str) -> float:
    begun = None
    for count, now in answer(url, text, NUM_TOKENS):
        if begun is None and count >= NUM_SKIPPED:
            begun = (now, count)
    return 1e3 * (now - begun[0]) / (count - begun[1])


def answer(url: str, text: str, num_tokens: int) -> list[tuple[int, float]]:
    """Return the tokens there were at each event of a greedy answer, and when."""
    params = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    body = {"text": text, "sampling_params": params, "stream": True}
    request = urllib.request.Request(
        f"{url}/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    events = []
    with urllib.request.urlopen(request, timeout=300) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                count = json.loads(line[6:])["meta_info"]["completion_tokens"]
                events.append((count, time.perf_counter()))
    return events


def summarise(records: list[dict]) -> list[dict[str, object]]:
    """Return, per concurrency and arm, its time over no speculation's.

    That is the geometric mean over starts of the median over turns, with the 95 %
    bootstrap interval over turns.
    """
    rng = np.random.default_rng(0)
    names = [n for n in records[0] if n not in ("start", "concurrency", "turn")]
    rows = []
    for concurrency in dict.fromkeys(record["concurrency"] for record in records):
        here = [record for record in records if record["concurrency"] == concurrency]
        for name in names:
            starts: dict[int, list[float]] = {}
            for record in here:
                ratio = record[name] / record[PLAIN]
                starts.setdefault(record["start"], []).append(ratio)
            medians = [np.median(ratios) for ratios in starts.values()]
            drawn = [
                np.median(rng.choice(ratios, (RESAMPLES, len(ratios))), axis=1)
                for ratios in starts.values()
            ]
            low, high = np.quantile(np.exp(np.log(drawn).mean(0)), [0.025, 0.975])
            rows.append(
                {
                    "concurrency": concurrency,
                    "arm": name,
                    "ms_per_token": statistics.median(r[name] for r in here),
                    "over_plain": float(np.exp(np.log(medians).mean())),
                    "interval": [float(low), float(high)],
                }
            )
    return rows


def show(rows: list[dict]) -> None:
    """Print the summary."""
    table = Table(title="time per token of a running request")
    for name in ("at once", "arm", "ms", "over no speculation", "95 % interval"):
        table.add_column(name)
    for row in rows:
        low, high = row["interval"]
        table.add_row(
            str(row["concurrency"]),
            row["arm"],
            f"{row['ms_per_token']:.1f}",
            f"{row['over_plain']:.3f}",
            f"{low:.3f} to {high:.3f}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
