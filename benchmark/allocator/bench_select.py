"""Times `select_draft_tokens` + `build_verify_plan` on one CPU core.

    python benchmark/allocator/bench_select.py [--output PATH] [--repeats N]

Random trees, all rows full; one thread. Per case the two calls are timed together and
apart, over many repeats after a warm-up; table and JSON give the median and the 10th
and 90th percentile of the wall clock, and of the processor time of the calling thread,
which other load on the machine disturbs less. With `--output`, writes JSON.

The medians are then judged (judge.py), in words: where others use the machine too, a
limit that was missed is no failure.

Why numba: it is compared here with the torch operations, which are a hundred small
ones and a sort where a loop makes a few passes; and, in selection, with the same loop
in C (selection.c, cc -O3 -march=native). C takes a quarter or so off the loop, 0.01 ms
of the 0.2 ms that both calls take at 64 requests: too little to need a compiler at
installation.
"""

import argparse
import ctypes
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from judge import LIMITS_MS, judge_growth, judge_times, verdict_lines
from sglang_tetris.core import (
    DraftTrees,
    build_verify_plan,
    cpu_backend,
    select_draft_tokens,
    warm_up,
)
from sglang_tetris.core.allocator import select_draft_tokens_torch
from sglang_tetris.core.layout import build_verify_plan_torch
from sglang_tetris.tools.provenance import provenance, utc_now

HERE = Path(__file__).resolve().parent
# (requests, drafts drafted per request): in the middle what a server sees, then both
# directions of growth.
SIZES = [(1, 63), (16, 63), (64, 63), (128, 63), (256, 63), (512, 63), (1024, 63)]
SIZES += [(64, 15), (64, 31), (64, 127), (64, 255)]
# What is verified: 8 per request on average at every size, the others at the two sizes
# that have a limit.
TARGETS = list(LIMITS_MS)
USUAL = {"drafts_per_request": 8, "limits": False}
OTHERS = [
    {"drafts_per_request": 3, "limits": False},
    {"drafts_per_request": 8, "limits": True},
    {"drafts_per_request": 63, "limits": False},
]


def random_trees(
    batch_size: int, max_nodes: int, generator: torch.Generator
) -> DraftTrees:
    """Trees whose nodes choose any earlier node, or the anchor, as their parent."""
    shape = (batch_size, max_nodes)
    pick = torch.rand(shape, generator=generator)
    return DraftTrees(
        tokens=torch.randint(0, 50_000, shape, generator=generator),
        parents=(pick * torch.arange(1, max_nodes + 1)).long() - 1,
        accept_probs=torch.rand(shape, generator=generator),
        num_nodes=torch.full((batch_size,), max_nodes),
    )


def compiled_round(trees: DraftTrees, budget: int, limits: Any, zeros, clock):
    caps, weights, floors = limits
    begin = clock()
    allocation = select_draft_tokens(
        trees,
        draft_budget=budget,
        max_drafts=caps,
        weights=weights,
        min_drafts=floors,
    )
    middle = clock()
    build_verify_plan(trees, allocation, anchors=zeros, prefix_lens=zeros)
    return middle - begin, clock() - middle


def torch_round(trees: DraftTrees, budget: int, limits: Any, zeros, clock):
    begin = clock()
    allocation = select_draft_tokens_torch(trees, budget, *limits)
    middle = clock()
    build_verify_plan_torch(trees, allocation, zeros, zeros, None, None)
    return middle - begin, clock() - middle


def summary(seconds: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(seconds, n=10)
    return {
        "median": round(statistics.median(seconds) * 1e3, 4),
        "p10": round(tenths[0] * 1e3, 4),
        "p90": round(tenths[-1] * 1e3, 4),
    }


def measure(
    run: Callable, size: tuple[int, int], case: dict[str, Any], repeats: int
) -> dict[str, Any]:
    batch_size, max_nodes = size
    generator = torch.Generator().manual_seed(0)
    trees = random_trees(*size, generator)
    limits: tuple[Any, Any, Any] = (None, None, None)
    if case["limits"]:
        weights = torch.rand(batch_size, generator=generator) + 0.5
        caps = torch.full((batch_size,), 16)
        limits = (caps, weights, torch.ones_like(caps))
    zeros = torch.zeros(batch_size, dtype=torch.int64)
    arguments = (trees, case["drafts_per_request"] * batch_size, limits, zeros)
    for _ in range(max(repeats // 10, 2)):
        run(*arguments, time.perf_counter)
    row: dict[str, Any] = {"batch_size": batch_size, "max_nodes": max_nodes, **case}
    for suffix, clock in (("wall_ms", time.perf_counter), ("cpu_ms", time.thread_time)):
        times = [run(*arguments, clock) for _ in range(repeats)]
        row[f"select_{suffix}"] = summary([select for select, _ in times])
        row[f"build_{suffix}"] = summary([build for _, build in times])
        row[f"both_{suffix}"] = summary([select + build for select, build in times])
    median = row["both_wall_ms"]["median"]
    row["both_wall_ns_per_node"] = round(median * 1e6 / (batch_size * max_nodes), 1)
    return row


def compare_loops(size: tuple[int, int], repeats: int) -> dict[str, Any]:
    """Time the selection's loop alone, as numba and as the C compiler make it."""
    from sglang_tetris.core.cpu_select import fill_selection

    batch_size, max_nodes = size
    trees = random_trees(*size, torch.Generator().manual_seed(0))
    parents, probs = trees.parents.numpy(), trees.accept_probs.numpy()
    num_nodes, budget = trees.num_nodes.numpy(), 8 * batch_size
    shape = (batch_size, max_nodes)
    floats, ints = np.empty(0, np.float32), np.empty(0, np.int64)
    keeps = [np.empty(shape, np.bool_) for _ in range(2)]
    lens, expected = np.empty(batch_size, np.int32), np.empty(batch_size, np.float32)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "selection.so"
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        source = str(HERE / "selection.c")
        subprocess.run(["cc", *flags, source, "-o", str(library)], check=True)
        loop = ctypes.CDLL(str(library)).fill_selection
    scratch = [np.empty(shape, np.float32), np.empty(shape, np.int64)]
    scratch += [np.empty(shape, np.int64), np.empty(max_nodes, np.int64)]
    sizes = [ctypes.c_int64(value) for value in (batch_size, max_nodes)]
    inputs, outputs = (parents, probs, num_nodes), (keeps[1], lens, expected)
    before, after = (
        [ctypes.c_void_p(array.ctypes.data) for array in arrays]
        for arrays in (inputs, [*scratch, *outputs])
    )

    def numba_loop() -> None:
        limits = (floats, ints, ints, budget)
        fill_selection(parents, probs, num_nodes, *limits, keeps[0], lens, expected)

    def c_loop() -> None:
        loop(*sizes, *before, ctypes.c_int64(budget), *after)

    row: dict[str, Any] = {"batch_size": batch_size, "max_nodes": max_nodes}
    for name, call in (("numba", numba_loop), ("c", c_loop)):
        seconds = []
        for _ in range(repeats):
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        row[f"{name}_wall_ms"] = summary(seconds)
    if not np.array_equal(*keeps):
        raise RuntimeError("selection.c and cpu_select.py differ: port the change")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repeats", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    origin = provenance()
    warm_up()
    compiled = [(size, USUAL) for size in SIZES]
    compiled += [(size, case) for size in TARGETS for case in OTHERS]
    # Verifying everything at 512 requests takes torch a third of a second a time.
    plain = [(size, USUAL) for size in TARGETS] + [(TARGETS[0], OTHERS[-1])]
    print(
        f"{'implementation':15}{'requests':>9}{'nodes':>6}{'kept/req':>9}{'limits':>7}"
        f"{'select ms':>11}{'build ms':>10}{'both ms':>9}{'p90':>8}{'ns/node':>9}"
    )
    rows = []
    for name, run, cases, repeats in (
        (cpu_backend(), compiled_round, compiled, arguments.repeats),
        ("torch", torch_round, plain, max(arguments.repeats // 15, 2)),
    ):
        for size, case in cases:
            row = measure(run, size, case, repeats)
            rows.append({"implementation": name, "repeats": repeats, **row})
            print(
                f"{name:15}{size[0]:9}{size[1]:6}{case['drafts_per_request']:9}"
                f"{'yes' if case['limits'] else '-':>7}"
                f"{row['select_wall_ms']['median']:11.3f}"
                f"{row['build_wall_ms']['median']:10.3f}"
                f"{row['both_wall_ms']['median']:9.3f}"
                f"{row['both_wall_ms']['p90']:8.3f}"
                f"{row['both_wall_ns_per_node']:9.1f}",
                flush=True,
            )
    loops = [compare_loops(size, arguments.repeats) for size in TARGETS]
    for row in loops:
        print(
            f"selection's loop alone, {row['batch_size']} x {row['max_nodes']}: "
            f"numba {row['numba_wall_ms']['median']:.3f} ms, "
            f"C {row['c_wall_ms']['median']:.3f} ms"
        )
    own = [row for row in rows if row["implementation"] == cpu_backend()]
    usual = [row for row in own if all(row[k] == v for k, v in USUAL.items())]
    times, growth = judge_times(own), judge_growth(usual)
    print(*verdict_lines(times, growth), sep="\n")
    if arguments.output is None:
        return
    origin["finished"] = utc_now()
    settings = {"repeats": arguments.repeats, "threads": torch.get_num_threads()}
    record = {"provenance": origin, "settings": settings, "verdicts": times}
    record |= {"growth": growth, "results": rows, "selection_loop": loops}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
