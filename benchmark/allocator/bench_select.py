"""Times `select_draft_tokens` + `build_verify_plan` on one CPU core.

    python benchmark/allocator/bench_select.py --output results/allocator.json

Random trees, all rows full (63 drafts a request). Per case the two calls are timed
together and apart, over many repeats after a warm-up; the table and the JSON give the
median and the 10th and 90th percentile of the wall clock, and of the processor time of
the calling thread, which other load on the machine disturbs less.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from sglang_tetris.core import (
    DraftTrees,
    build_verify_plan,
    cpu_backend,
    select_draft_tokens,
    warm_up,
)
from sglang_tetris.core.allocator import select_draft_tokens_torch
from sglang_tetris.core.layout import build_verify_plan_torch

MAX_NODES = 63


def random_trees(batch_size: int, generator: torch.Generator) -> DraftTrees:
    """Trees whose nodes choose any earlier node, or the anchor, as their parent."""
    shape = (batch_size, MAX_NODES)
    pick = torch.rand(shape, generator=generator)
    return DraftTrees(
        tokens=torch.randint(0, 50_000, shape, generator=generator),
        parents=(pick * torch.arange(1, MAX_NODES + 1)).long() - 1,
        accept_probs=torch.rand(shape, generator=generator),
        num_nodes=torch.full((batch_size,), MAX_NODES),
    )


def compiled_round(
    trees: DraftTrees, budget: int, caps: int | None, weights, zeros, clock
):
    begin = clock()
    allocation = select_draft_tokens(
        trees, draft_budget=budget, max_drafts=caps, weights=weights
    )
    middle = clock()
    build_verify_plan(trees, allocation, anchors=zeros, prefix_lens=zeros)
    return middle - begin, clock() - middle


def torch_round(
    trees: DraftTrees, budget: int, caps: int | None, weights, zeros, clock
):
    begin = clock()
    allocation = select_draft_tokens_torch(trees, budget, caps, weights, None)
    middle = clock()
    build_verify_plan_torch(trees, allocation, zeros, zeros, None, None)
    return middle - begin, clock() - middle


def measure(run, batch_size: int, case: dict[str, Any], repeats: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    trees = random_trees(batch_size, generator)
    weights = torch.rand(batch_size, generator=generator) + 0.5
    zeros = torch.zeros(batch_size, dtype=torch.int64)
    arguments = (
        trees,
        case["drafts_per_request"] * batch_size,
        case["max_drafts"],
        weights if case["weights"] else None,
        zeros,
    )
    for _ in range(max(repeats // 10, 3)):
        run(*arguments, time.perf_counter)
    row: dict[str, Any] = {"batch_size": batch_size, "max_nodes": MAX_NODES, **case}
    for suffix, clock in (("wall_ms", time.perf_counter), ("cpu_ms", time.thread_time)):
        times = [run(*arguments, clock) for _ in range(repeats)]
        for name, values in (
            ("select", [select for select, _ in times]),
            ("build", [build for _, build in times]),
            ("both", [select + build for select, build in times]),
        ):
            tenths = statistics.quantiles(values, n=10)
            row[f"{name}_{suffix}"] = {
                "median": round(statistics.median(values) * 1e3, 4),
                "p10": round(tenths[0] * 1e3, 4),
                "p90": round(tenths[-1] * 1e3, 4),
            }
    return row


def provenance() -> dict[str, Any]:
    def git(*arguments: str) -> str | None:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip() if done.returncode == 0 else None

    model = platform.processor()
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain")),
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "numpy", "numba")},
        },
        "machine": {
            "cpu": model,
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "load_average_at_start": os.getloadavg()[0],
            "threads": torch.get_num_threads(),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 512])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    origin = provenance()
    warm_up()
    cases = [
        {"drafts_per_request": 3, "max_drafts": None, "weights": False},
        {"drafts_per_request": 8, "max_drafts": None, "weights": False},
        {"drafts_per_request": 8, "max_drafts": 16, "weights": True},
        {"drafts_per_request": MAX_NODES, "max_drafts": None, "weights": False},
    ]
    print(
        f"{'implementation':15}{'requests':>9}{'drafts/req':>11}{'cap':>5}"
        f"{'select ms':>11}{'build ms':>10}{'both ms':>9}{'p90':>8}{'both cpu ms':>13}"
    )
    rows = []
    for name, run, share in (
        (cpu_backend(), compiled_round, 1),
        ("torch", torch_round, 50),
    ):
        for batch_size in arguments.batch_sizes:
            for case in cases:
                repeats = max(arguments.repeats // share, 10)
                row = measure(run, batch_size, case, repeats)
                rows.append({"implementation": name, "repeats": repeats, **row})
                print(
                    f"{name:15}{batch_size:9}{case['drafts_per_request']:11}"
                    f"{case['max_drafts'] or '-':>5}"
                    f"{row['select_wall_ms']['median']:11.3f}"
                    f"{row['build_wall_ms']['median']:10.3f}"
                    f"{row['both_wall_ms']['median']:9.3f}"
                    f"{row['both_wall_ms']['p90']:8.3f}"
                    f"{row['both_cpu_ms']['median']:13.3f}"
                )
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"provenance": origin, "results": rows}, indent=2)
        arguments.output.write_text(text + "\n")
        print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
