"""Measure what rounds cost on a server, for `--tetris-cost-table`.

    python -m sglang_tetris.tools.profile_cost cost.json [-- LAUNCH FLAGS]

Starts a TETRIS server (of the flags after `--`, by default the demo's), keeps N
requests running for several N, greedy, sampled, and with top-p, of prompts of several
lengths, and changes the budget from 0 (plain decoding) upwards while they run. Every
round's parts are measured by the server itself, through its trace. Writes the fitted
table as JSON with its provenance, and a plot of the measured and the fitted times
beside it. Nothing else should run meanwhile.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

from rich.progress import Progress

from sglang_tetris.core.cost_table import PHASES, CostSample, CostTable
from sglang_tetris.tools.arms import TETRIS, make_arm
from sglang_tetris.tools.prepare_model import prepare
from sglang_tetris.tools.provenance import module_command, provenance, utc_now
from sglang_tetris.tools.server_process import (
    ServerError,
    ServerProcess,
    exit_on_signals,
    running_server,
)

COMMAND = "sglang_tetris.tools.profile_cost"
BUDGETS = ("0", "1x", "0", "2x", "1", "64x")
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "multinomial": {"temperature": 1.0},
    "sorted": {"temperature": 1.0, "top_p": 0.9},
}
ROUNDS_PER_BUDGET = 10
MAX_TOKENS, LONGEST_PROMPT = 1000, 300
TIMEOUT_S = 600
VERIFY = "verify"


def main(arguments: list[str] | None = None) -> int:
    """Measure, fit and write; 0, or 1 after a message on standard error."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    exit_on_signals()
    origin = provenance(module_command(COMMAND, arguments))
    try:
        check(options)
        flags = options.flags or default_flags(max(options.concurrency))
        samples = measure(flags, options.concurrency, options.rounds)
        table = fit(samples)
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, OSError, ValueError) as error:
        print(f"profile_cost: {error}", file=sys.stderr)
        return 1
    origin |= {
        "finished": utc_now(),
        "measured": True,  # tables that were computed say False
        "model": model_of(flags),
        "flags": flags,
        "samples": {phase: len(found) for phase, found in samples.items()},
    }
    written = json.loads(table.to_json()) | {"provenance": origin}
    options.output.write_text(json.dumps(written, indent=1) + "\n")
    image = options.output.with_suffix(".png")
    plot(samples, table, image)
    print(f"wrote {options.output} and {image}")
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the command line's values; `flags` is what stands after `--`."""
    # argparse finds no flags behind `--` where an option stands before it.
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="After --: flags of launch_server, by default the demo's.",
    )
    parser.add_argument("output", type=Path)
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64]
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS_PER_BUDGET)
    options = parser.parse_args(arguments[:at])
    options.flags = arguments[at + 1 :]
    return options


def check(options: argparse.Namespace) -> None:
    """Refuse, before anything is measured, what cannot be measured or written."""
    for name, values in (
        ("concurrency", options.concurrency),
        ("rounds", [options.rounds]),
    ):
        if min(values) < 1:
            raise ValueError(f"--{name} must be at least 1, got {min(values)}")
    if options.output.suffix == ".png" or options.output.is_dir():
        raise ValueError(f"output must be a JSON file, got {options.output}")
    options.output.parent.mkdir(parents=True, exist_ok=True)


def model_of(flags: Sequence[str]) -> str | None:
    """Return the target model that the flags name; None if they leave it open."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", "--model")
    path: str | None = parser.parse_known_args(flags)[0].model_path
    return path


def default_flags(num_requests: int) -> list[str]:
    """Return the demo's flags, with room for so many requests at once."""
    tokens = num_requests * (MAX_TOKENS + LONGEST_PROMPT)
    return [*make_arm(TETRIS, prepare()).flags, "--max-total-tokens", str(tokens)]


def measure(
    flags: list[str], concurrencies: list[int], rounds: int
) -> dict[str, list[CostSample]]:
    """Return the measured parts of rounds, by phase."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        own = ("--tetris-trace", str(trace), "--tetris-budget", "0")
        log = Path(folder) / "server.log"
        steps = len(concurrencies) * len(SAMPLING) * len(BUDGETS)
        with Progress() as progress:
            bar = progress.add_task("starting the server", total=steps)
            with running_server((*flags, *own), log_path=log) as server:
                for num_requests in concurrencies:
                    for kind, params in SAMPLING.items():
                        progress.update(bar, description=f"{num_requests} x {kind}")
                        with _Load(server, num_requests, params) as load:
                            for budget in BUDGETS:
                                _set_budget(server.url, budget)
                                _await_rounds(trace, rounds, load.check)
                                progress.advance(bar)
        return _samples(trace)


def fit(samples: dict[str, list[CostSample]]) -> CostTable:
    """Return the table of the measured parts; ValueError if one was not measured."""
    missing = {VERIFY, "decode"} - set(samples)
    if missing:
        raise ValueError(f"no round measured the phases {sorted(missing)}")
    phases = {name: CostTable.fit(samples[name]) for name in PHASES if name in samples}
    return replace(CostTable.fit(samples[VERIFY]), phases=phases)


def plot(samples: dict[str, list[CostSample]], table: CostTable, path: Path) -> None:
    """Draw measured and fitted milliseconds over rows, one panel per phase."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in (VERIFY, *PHASES) if name in samples]
    figure, axes = pyplot.subplots(2, -(-len(names) // 2), figsize=(14, 6))
    for axis, name in zip(axes.flat, names, strict=False):
        fitted = table if name == VERIFY else table.phases[name]
        for values, mark, label in (
            ([s.step_time_s for s in samples[name]], ".", "measured"),
            ([_time_of(fitted, s) for s in samples[name]], "x", "fitted"),
        ):
            rows = [sample.total_verify_tokens for sample in samples[name]]
            axis.plot(
                rows, [1e3 * value for value in values], mark, label=label, alpha=0.5
            )
        axis.set(title=name, xlabel="rows", ylabel="ms", xscale="log", yscale="log")
    for axis in list(axes.flat)[len(names) :]:
        axis.axis("off")
    axes.flat[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


class _Load:
    """Keeps so many requests running, as a context."""

    def __init__(
        self, server: ServerProcess, num_requests: int, params: dict[str, float]
    ) -> None:
        self._server, self._params = server, params
        self._num_requests = num_requests
        self._threads: list[threading.Thread] = []
        self._failure: ServerError | None = None
        self._over = False

    def __enter__(self) -> "_Load":
        for place in range(self._num_requests):
            thread = threading.Thread(target=self._run, args=(place,), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        with suppress(ServerError):  # what failed before has been said
            _post(f"{self._server.url}/abort_request", {"abort_all": True})
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        # A refused connection is said less well than what the log ends with.
        self._server.check_running()

    def check(self) -> None:
        """Raise ServerError if a request failed, as all do once the server ended."""
        if self._failure is not None:
            raise self._failure

    def _run(self, place: int) -> None:
        params = {"max_new_tokens": MAX_TOKENS, "ignore_eos": True, **self._params}
        turn = 0
        while not self._over:
            # No prompt begins as another did: all of it is read.
            words = "and so on " * (2 << (place + turn) % 6)
            text = f"{time.monotonic()}, {place}: tell me the story of {words}."
            body = {"text": text, "sampling_params": params}
            try:
                _post(f"{self._server.url}/generate", body)
            except ServerError as error:
                # Aborted at the end, a request may fail as well: nobody asks then.
                self._failure = error
                return
            turn += 1


def _await_rounds(trace: Path, rounds: int, check: Callable[[], None]) -> None:
    """Wait until the trace has grown by so many rounds; `check` says if it cannot."""
    target = _num_lines(trace) + rounds
    deadline = time.monotonic() + TIMEOUT_S
    while _num_lines(trace) < target:
        check()
        if time.monotonic() > deadline:
            raise ServerError(f"the server ran no {rounds} rounds in {TIMEOUT_S} s")
        time.sleep(0.05)


def _num_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(
            block.count(b"\n") for block in iter(lambda: file.read(1 << 16), b"")
        )


def _samples(trace: Path) -> dict[str, list[CostSample]]:
    found: dict[str, list[CostSample]] = defaultdict(list)
    with trace.open(encoding="utf-8") as lines:
        next(lines)
        for line in lines:
            for phase, tokens, batch_size, kv, time_s in json.loads(line)["laps"]:
                if time_s > 0:
                    found[phase].append(CostSample(tokens, batch_size, kv, time_s))
    return dict(found)


def _time_of(table: CostTable, sample: CostSample) -> float:
    return table.step_time_s(
        total_verify_tokens=sample.total_verify_tokens,
        batch_size=sample.batch_size,
        total_kv_tokens=sample.total_kv_tokens,
    )


def _set_budget(url: str, budget: str) -> None:
    _post(f"{url}/tetris/budget", {"draft_budget": budget})


def _post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            reply.read()
    except (OSError, HTTPException) as error:
        raise ServerError(f"the server failed at {url}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
