"""Shows what the simulator found: tables on the terminal, as Markdown, and a plot.

An entry of a policy is its tokens per second relative to the best baseline of the same
load: no speculation, fixed chains, the paper's rule, DSD. In brackets, from the very
start, the rounds that measure costs included.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from sglang_tetris.simulator.comparison import against_baselines
from sglang_tetris.simulator.policies.catalog import AUTO, BASELINES

Rows = Sequence[dict[str, Any]]
Lines = list[list[str]]
# Beside `auto`, what shows how much there is to gain and what the alternatives lose.
_CONTEXT = ("none", "dsd", "oracle-trees")


def write_report(result: Mapping[str, Any], path: Path | None) -> None:
    """Print the tables; with a path, write JSON there and .md and .png beside it."""
    sections = [("Correct drafts at equal budgets", *budget_lines(result["budgets"]))]
    sections += [
        (f"Tokens per second, {name}", *speed_lines(rows))
        for name, rows in result["tables"].items()
    ]
    console = Console(width=130)
    for title, header, lines in sections:
        if lines:
            console.print(_rich_table(title, header, lines))
    summary = summary_lines(result["tables"])
    for line in summary:
        console.print(f"- {line}")
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    parts = [_markdown(*section) for section in sections if section[2]]
    parts += ["\n".join(f"- {line}" for line in summary)]
    path.with_suffix(".md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    plot(result["tables"], path.with_suffix(".png"))
    console.print(f"wrote {path} and, beside it, .md and .png")


def budget_lines(rows: Rows) -> tuple[list[str], Lines]:
    """Return (header, lines) of what policies get out of equal budgets."""
    header = ["drafts per request", "policy", "correct per request and round"]
    header += ["of the gap from fixed to oracle", "over the paper's rule"]
    return header, [
        [
            f"{row['budget']}x",
            row["policy"],
            f"{row['correct_per_request_round']:.3f}",
            f"{row['closed']:.0%}",
            f"{row['over_paper']:+.1%}",
        ]
        for row in rows
    ]


def speed_lines(rows: Rows) -> tuple[list[str], Lines]:
    """Return (header, lines) of one cost table: one line per load."""
    names = dict.fromkeys(row["policy"] for row in rows)
    autos = _autos(rows)
    shown = [*autos, *(name for name in _CONTEXT if name in names)]
    found = {name: against_baselines(rows, name) for name in shown}
    header = ["load", "best baseline", "tokens/s", *shown]
    lines = []
    for place, first in enumerate(found[shown[0]] if shown else []):
        line = [f"{first['load']:g}", first["best"]]
        line.append(f"{first['best_tokens_per_s']:.1f}")
        for name in shown:
            entry = found[name][place]
            start = f" ({entry['ratio_from_start']:.3f})" if name in autos else ""
            line.append(f"{entry['ratio']:.3f}{start}")
        lines.append(line)
    return header, lines


def summary_lines(tables: Mapping[str, Rows]) -> list[str]:
    """Return one line per cost table and kind of `auto`: its worst load, its wins."""
    lines = []
    for table, rows in tables.items():
        for name in _autos(rows):
            found = against_baselines(rows, name)
            worst = min(found, key=lambda entry: float(entry["ratio"]))
            wins = sum(entry["ratio"] > 1 for entry in found)
            lines.append(
                f"{table}, {name}: at least {worst['ratio']:.3f} of the best baseline, "
                f"at load {worst['load']:g}; above it at {wins} of {len(found)} loads"
            )
    return lines


def plot(tables: Mapping[str, Rows], path: Path) -> None:
    """Draw speeds relative to the best baseline over load, a panel per cost table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(tables), figsize=(4.5 * len(tables), 4), squeeze=False, sharey=True
    )
    for axis, (table, rows) in zip(axes.flat, tables.items(), strict=True):
        names = dict.fromkeys(row["policy"] for row in rows)
        for name in names:
            if name in BASELINES and name not in _CONTEXT:
                continue
            found = against_baselines(rows, name)
            axis.plot(
                [entry["load"] for entry in found],
                [entry["ratio"] for entry in found],
                marker=".",
                linestyle="-" if name in _autos(rows) else ":",
                label=name,
            )
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set(title=table, xscale="log", xlabel="load", ylim=(0.4, None))
    axes.flat[0].set_ylabel("tokens/s, relative to the best baseline")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=6, fontsize="small"
    )
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _autos(rows: Rows) -> list[str]:
    """Return the kinds of `auto` that were run, those of every run first."""
    run = dict.fromkeys(row["policy"] for row in rows)
    others = [name for name in run if name.startswith("auto-") and name not in AUTO]
    return [*(name for name in AUTO if name in run), *others]


def _rich_table(title: str, header: Sequence[str], lines: Lines) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for place, name in enumerate(header):
        table.add_column(name, justify="left" if place < 2 else "right")
    for line in lines:
        table.add_row(*line)
    return table


def _markdown(title: str, header: Sequence[str], lines: Lines) -> str:
    rows = [header, ["---", "---", *("---:" for _ in header[2:])], *lines]
    return "\n".join([f"### {title}", "", *(f"| {' | '.join(row)} |" for row in rows)])
