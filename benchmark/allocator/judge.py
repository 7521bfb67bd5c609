"""Whether the allocator is as fast as it has to be: limits, and how its time grows.

Judged by the median wall clock of `select_draft_tokens` + `build_verify_plan` on one
core. Growth is e in time ~ nodes^e, where 1 is linear, n log n is 1.1 at these sizes,
and below 1 a part of the time is the same for any number of nodes. Between neighbouring
sizes e shows where time bends, but a tenth of noise moves it by 0.15; so what is judged
is the line through all sizes from the first one that has a limit.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import linear_regression
from typing import Any

# (requests, drafts drafted per request) -> milliseconds of both calls together.
LIMITS_MS = {(64, 63): 0.3, (512, 63): 2.0}
# n log n, and a tenth for the noise.
MAX_EXPONENT = 1.2

Size = tuple[int, int]
Row = Mapping[str, Any]


def judge_times(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a verdict per row whose size has a limit."""
    verdicts = []
    for row in rows:
        limit_ms = LIMITS_MS.get(_size(row))
        if limit_ms is None:
            continue
        names = ("batch_size", "max_nodes", "drafts_per_request", "limits")
        verdict = {name: row[name] for name in names} | {"limit_ms": limit_ms}
        took_ms = _took_ms(row)
        verdicts.append(verdict | {"took_ms": took_ms, "met": took_ms < limit_ms})
    return verdicts


def judge_growth(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a verdict on more requests, and one on more nodes; one row per size."""
    times = {_size(row): _took_ms(row) for row in rows}
    first = min(LIMITS_MS)
    verdicts = []
    for along, name in enumerate(("requests", "nodes")):
        line = sorted(size for size in times if size[1 - along] == first[1 - along])
        steps = [
            {
                "from": list(pair[0]),
                "to": list(pair[1]),
                "exponent": _slope(times, pair),
            }
            for pair in pairwise(line)
        ]
        exponent = _slope(times, [size for size in line if size >= first])
        verdict = {"more": name, "exponent": exponent, "limit": MAX_EXPONENT}
        verdict["met"] = exponent <= MAX_EXPONENT
        verdicts.append(verdict | {"steps": steps})
    return verdicts


def verdict_lines(times: Sequence[Row], growth: Sequence[Row]) -> list[str]:
    """Return the verdicts as they are printed."""
    lines = [
        f"{one['batch_size']} x {one['max_nodes']} under {one['limit_ms']:g} ms, "
        f"{one['drafts_per_request']} kept per request"
        f"{', with limits per request' if one['limits'] else ''}: "
        f"{_said(one)} ({one['took_ms']:.3f} ms)"
        for one in times
    ]
    for one in growth:
        steps = ", ".join(
            f"{step['exponent']:.2f} to {step['to'][0]} x {step['to'][1]}"
            for step in one["steps"]
        )
        lines.append(
            f"growth with {one['more']} close to linear, exponent up to "
            f"{one['limit']:g}: {_said(one)} ({one['exponent']:.2f}; {steps})"
        )
    return lines


def _said(verdict: Row) -> str:
    return "met" if verdict["met"] else "not met"


def _size(row: Row) -> Size:
    return row["batch_size"], row["max_nodes"]


def _took_ms(row: Row) -> float:
    took_ms: float = row["both_wall_ms"]["median"]
    return took_ms


def _slope(times: Mapping[Size, float], sizes: Sequence[Size]) -> float:
    nodes = [math.log(math.prod(size)) for size in sizes]
    taken = [math.log(times[size]) for size in sizes]
    return round(linear_regression(nodes, taken).slope, 3)
