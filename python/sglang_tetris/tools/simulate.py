"""Replay a recording against any policy and cost table.

    python -m sglang_tetris.tools.simulate TRACE --cost-table FILE [FILE ...]
        [--concurrency 1 2 4 ...] [--policies NAME ...] [--output RESULT.json]

TRACE is what tools.record_replay writes, or the `--tetris-trace` of a server that
drafts at every token: budget 0, `draft_always` and `trace_tokens` in its configuration.
Closed loop: so many requests are always in flight; with `--rate`, requests arrive by
themselves, at most `--capacity` running per server. First, without any cost, correct
drafts per round at equal budgets; then, for each cost table and load, tokens per second
of every policy and how `auto` compares with the best of no speculation, fixed chains,
the paper's rule and DSD. Prints tables; with `--output`, writes JSON and, beside it,
the tables as .md and a plot as .png.

Policies are named in simulator.policies.catalog; what is modelled and what not, in
docs/simulator.md.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rich.progress import Progress

from sglang_tetris.core.cost_table import CostTable
from sglang_tetris.core.replay import TRACE_FORMAT, Replay, read_replay
from sglang_tetris.simulator.calibrator import LearntCalibration, NoCalibration
from sglang_tetris.simulator.comparison import (
    Effort,
    compare_budgets,
    simulate,
    speed_row,
)
from sglang_tetris.simulator.driver import ROUTERS, Arrivals
from sglang_tetris.simulator.forests import Recording
from sglang_tetris.simulator.policies.catalog import AUTO, BASELINES, OTHERS, Catalog
from sglang_tetris.tools.provenance import (
    module_command,
    provenance,
    sha256_of,
    utc_now,
)
from sglang_tetris.tools.simulate_report import write_report
from sglang_tetris.tools.trace_replay import replay_of_trace

CONCURRENCIES = tuple(2**exponent for exponent in range(11))
POLICIES = (*BASELINES, *OTHERS, *AUTO)
COMMAND = "sglang_tetris.tools.simulate"


def main(arguments: list[str] | None = None) -> int:
    """Simulate, print and write; 0, or 1 after one sentence on standard error."""
    options = parse(arguments)
    try:
        replay = load_replay(options.trace)
        recording = Recording.from_replay(replay)
        tables = {
            path.stem: CostTable.from_json(path.read_text(encoding="utf-8"))
            for path in options.cost_table
        }
        for table in tables.values():
            catalog = Catalog(recording, table, NoCalibration)
            for name in options.policies:
                catalog.make(name)
    except (OSError, ValueError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 1
    result: dict[str, Any] = {
        "provenance": origin(options, arguments, replay.header.provenance),
        "settings": settings(options),
        "budgets": budget_rows(options, recording, next(iter(tables.values()))),
    }
    result["tables"] = {
        name: speed_rows(options, recording, name, table)
        for name, table in tables.items()
    }
    result["provenance"]["finished"] = utc_now()
    write_report(result, options.output)
    return 0


def load_replay(path: Path) -> Replay:
    """Read a recording, or make one of a trace; ValueError says what is wrong."""
    if path.suffix == ".gz":
        return read_replay(path)
    with path.open(encoding="utf-8") as file:
        is_trace = TRACE_FORMAT in file.readline()
    return replay_of_trace(path) if is_trace else read_replay(path)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path, help="a .replay.jsonl or .jsonl.gz")
    parser.add_argument("--cost-table", type=Path, nargs="+", required=True)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency", type=int, nargs="+", help="requests in flight, all replicas"
    )
    load.add_argument("--rate", type=float, nargs="+", help="arrivals per second")
    parser.add_argument("--capacity", type=int, default=1024, help="running, a replica")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--router", choices=ROUTERS, default=ROUTERS[0])
    parser.add_argument(
        "--budgets", type=int, nargs="*", default=(1, 2), help="drafts per request"
    )
    parser.add_argument("--budget-concurrency", type=int, default=16)
    parser.add_argument("--no-calibration", action="store_true")
    parser.add_argument("--rounds", type=int, default=3000, help="at most, a run")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    return parser.parse_args(arguments)


def budget_rows(
    options: argparse.Namespace, recording: Recording, table: CostTable
) -> list[dict[str, Any]]:
    """Return what policies get out of equal budgets; the table does not matter."""
    return compare_budgets(
        recording,
        table,
        options.budgets,
        options.budget_concurrency,
        make_calibrator=_calibration(options),
        effort=_effort(options),
    )


def speed_rows(
    options: argparse.Namespace, recording: Recording, name: str, table: CostTable
) -> list[dict[str, Any]]:
    """Return one row per load and policy, with a bar that shows how far it is."""
    tasks = [(load, policy) for load in _loads(options) for policy in options.policies]
    rows = []
    with Progress() as progress:
        bar = progress.add_task(name, total=len(tasks))
        for row in _run_all(options, recording, table, tasks):
            rows.append(row)
            progress.advance(bar)
    return rows


def _run_all(
    options: argparse.Namespace,
    recording: Recording,
    table: CostTable,
    tasks: Sequence[tuple[Arrivals, str]],
) -> Iterator[dict[str, Any]]:
    if options.jobs == 1:
        yield from (_run(options, recording, table, *task) for task in tasks)
        return
    with ProcessPoolExecutor(
        options.jobs, initializer=_share, initargs=(options, recording, table)
    ) as pool:
        yield from pool.map(_run_shared, tasks)


def _run(
    options: argparse.Namespace,
    recording: Recording,
    table: CostTable,
    arrivals: Arrivals,
    policy: str,
) -> dict[str, Any]:
    outcome = simulate(
        recording,
        table,
        policy,
        arrivals,
        make_calibrator=_calibration(options),
        effort=_effort(options),
        replicas=options.replicas,
        capacity=options.capacity,
        router=options.router,
    )
    return speed_row(policy, arrivals, outcome)


_shared: list[Any] = []


def _share(*values: Any) -> None:
    """Keep what every task of a process needs."""
    _shared[:] = values


def _run_shared(task: tuple[Arrivals, str]) -> dict[str, Any]:
    options, recording, table = _shared
    return _run(options, recording, table, *task)


def _loads(options: argparse.Namespace) -> list[Arrivals]:
    if options.rate:
        return [Arrivals(rate=rate) for rate in options.rate]
    return [Arrivals(concurrency=n) for n in options.concurrency or CONCURRENCIES]


def _calibration(options: argparse.Namespace) -> Any:
    return NoCalibration if options.no_calibration else LearntCalibration


def _effort(options: argparse.Namespace) -> Effort:
    return Effort(
        least_rounds=min(1000, options.rounds),
        most_rounds=options.rounds,
        seed=options.seed,
    )


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that shape the result, as JSON values."""
    left_out = ("cost_table", "trace", "output", "jobs")
    return {k: v for k, v in vars(options).items() if k not in left_out}


def origin(
    options: argparse.Namespace,
    arguments: list[str] | None,
    recorded: Mapping[str, Any],
) -> dict[str, Any]:
    """Return where a result comes from. No number of it depends on the machine."""
    return {
        **provenance(module_command(COMMAND, arguments)),
        "recorded": dict(recorded),
        "sha256": sha256_of((options.trace, *options.cost_table)),
    }


if __name__ == "__main__":
    sys.exit(main())
