"""Turn a result of run.py into a table, a plot and, if wanted, the README's table.

    python benchmark/serving/report.py results/serving.json [--readme]

An arm's ratio is its tokens per second over those of no speculation in the same round
and at the same concurrency; shown are the median over rounds and, in brackets, the
smallest and the largest.
"""

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from sglang_tetris.tools.arms import COST_ARM_NAMES, PLAIN, TETRIS

BASELINE, SUBJECT = PLAIN, TETRIS
README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def summarise(runs: Sequence[dict]) -> list[dict]:
    """Return one record per arm and concurrency, in the order of first appearance.

    `ratio` is None where no round has a baseline to compare with, and so is
    `pace_ratio`: the baseline's time per token after the first over the arm's.
    """
    base = {
        (run["round"], run["concurrency"]): run
        for run in runs
        if run["arm"] == BASELINE
    }
    groups: dict[tuple[str, int], list[dict]] = {}
    for run in sorted(runs, key=lambda run: run["round"]):
        groups.setdefault((run["arm"], run["concurrency"]), []).append(run)
    summary = []
    for (arm, concurrency), group in groups.items():
        pairs = [
            (run, base[run["round"], concurrency])
            for run in group
            if (run["round"], concurrency) in base
        ]
        ratios = [
            own["output_throughput"] / other["output_throughput"]
            for own, other in pairs
        ]
        paces = [
            other["median_tpot_ms"] / own["median_tpot_ms"] for own, other in pairs
        ]
        accept = [run["accept_length"] for run in group if run.get("accept_length")]
        summary.append(
            {
                "arm": arm,
                "label": group[0]["label"],
                "concurrency": concurrency,
                "rounds": len(group),
                "tokens_per_s": _spread(run["output_throughput"] for run in group),
                "ratio": _spread(ratios) if ratios else None,
                "pace_ratio": _spread(paces) if paces else None,
                "accept_length": statistics.median(accept) if accept else None,
                "median_ttft_ms": statistics.median(
                    run["median_ttft_ms"] for run in group
                ),
                "median_tpot_ms": statistics.median(
                    run["median_tpot_ms"] for run in group
                ),
            }
        )
    return summary


def _spread(values: Iterable[float]) -> dict[str, float]:
    found = sorted(values)
    median = statistics.median(found)
    return {"median": median, "min": found[0], "max": found[-1]}


def compare_subject(runs: Sequence[dict]) -> dict[str, dict[int, float]]:
    """Return TETRIS's tokens/s over each other arm's: label -> concurrency -> ratio.

    Each the median over rounds of the two arms' ratio in the same round; empty without
    a run of TETRIS.
    """
    speed = {
        (run["round"], run["concurrency"]): run["output_throughput"]
        for run in runs
        if run["arm"] == SUBJECT
    }
    ratios: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        place = (run["round"], run["concurrency"])
        if run["arm"] not in (SUBJECT, BASELINE) and place in speed:
            found = ratios.setdefault(run["label"], {})
            ratio = speed[place] / run["output_throughput"]
            found.setdefault(run["concurrency"], []).append(ratio)
    return {
        label: {at: statistics.median(found[at]) for at in sorted(found)}
        for label, found in ratios.items()
    }


def table_rows(summary: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows): one row per arm, two columns per concurrency."""
    concurrencies = sorted({entry["concurrency"] for entry in summary})
    header = ["arm"]
    for concurrency in concurrencies:
        header += [f"tok/s @{concurrency}", "ratio"]
    header.append("accept length")
    rows = []
    for label in dict.fromkeys(entry["label"] for entry in summary):
        entries = {e["concurrency"]: e for e in summary if e["label"] == label}
        row = [label]
        for concurrency in concurrencies:
            entry = entries.get(concurrency)
            ratio = entry and entry["ratio"]
            row.append(f"{entry['tokens_per_s']['median']:.1f}" if entry else "-")
            row.append(
                f"{ratio['median']:.2f} [{ratio['min']:.2f}, {ratio['max']:.2f}]"
                if ratio
                else "-"
            )
        lengths = [e["accept_length"] for e in entries.values() if e["accept_length"]]
        row.append(f"{lengths[-1]:.2f}" if lengths else "-")
        rows.append(row)
    return header, rows


def to_markdown(result: dict) -> str:
    """Return the table with the hardware, model and load that it belongs to."""
    header, rows = table_rows(result["summary"])
    lines = [f"| {' | '.join(header)} |", "|" + "---|" + "---:|" * (len(header) - 1)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += [
        "",
        *(
            f"- TETRIS over {label}, in the same round: "
            + ", ".join(f"{ratio:.2f} @{at}" for at, ratio in ratios.items())
            + "."
            for label, ratios in compare_subject(result["runs"]).items()
        ),
        *_paces(result["summary"]),
    ]
    machine, settings = result["provenance"]["machine"], result["settings"]
    device = machine["accelerator"] or f"{machine['cpu']}, {machine['cores']} cores"
    lines += [
        "",
        f"{device}; SmolLM2-135M-Instruct, {settings['dtype']}, "
        f"{settings['draft']} draft; {settings['output_len']} tokens per answer, "
        f"{' / '.join(map(str, settings['num_prompts']))} "
        f"chat, code, maths and text prompts; ratio to no speculation: median "
        f"[smallest, largest] of {settings['rounds']} rounds; sglang "
        f"{result['provenance']['versions']['sglang']}, "
        f"{result['provenance']['started'][:10]}.",
    ]
    return "\n".join(lines) + "\n"


def _paces(summary: Sequence[dict]) -> list[str]:
    """Return a line per cost arm: how fast tokens follow, once a request runs."""
    lines = []
    for label in dict.fromkeys(
        e["label"] for e in summary if e["arm"] in COST_ARM_NAMES
    ):
        paces = {
            e["concurrency"]: e["pace_ratio"] for e in summary if e["label"] == label
        }
        shown = ", ".join(
            f"{pace['median']:.3f} [{pace['min']:.3f}, {pace['max']:.3f}] @{at}"
            for at, pace in sorted(paces.items())
            if pace
        )
        lines.append(
            f"- {label}, pace after the first token relative to none: {shown}."
        )
    return lines


def write_plot(result: dict, path: Path) -> None:
    """Draw the ratio of every arm over concurrency, with its spread."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    summary = result["summary"]
    compared = [entry for entry in summary if entry["arm"] != BASELINE]
    labels = list(dict.fromkeys(entry["label"] for entry in compared))
    concurrencies = sorted({entry["concurrency"] for entry in summary})
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    width = 0.8 / max(1, len(labels))
    for index, label in enumerate(labels):
        bars = [e for e in summary if e["label"] == label and e["ratio"]]
        places = [
            concurrencies.index(e["concurrency"])
            + (index - (len(labels) - 1) / 2) * width
            for e in bars
        ]
        middle = [e["ratio"]["median"] for e in bars]
        below = [e["ratio"]["median"] - e["ratio"]["min"] for e in bars]
        above = [e["ratio"]["max"] - e["ratio"]["median"] for e in bars]
        axes.bar(
            places, middle, width * 0.9, yerr=[below, above], capsize=3, label=label
        )
    axes.axhline(1.0, color="black", linewidth=0.8, label="no speculation")
    axes.set_xticks(range(len(concurrencies)), [str(c) for c in concurrencies])
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel("tokens/s, relative to no speculation")
    figure.legend(fontsize="small", frameon=False, ncols=3, loc="outside upper center")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def update_readme(table: str, readme: Path = README) -> None:
    """Replace what stands between the README's marks.

    Raises:
        RuntimeError: the marks are not there, once each and in order.
    """
    text = readme.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise RuntimeError(f"{readme.name} needs {BEGIN} and {END} once each.")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    readme.write_text(f"{before}{BEGIN}\n\n{table}\n{END}{after}")


def print_table(summary: Sequence[dict]) -> None:
    """Print one row per concurrency and arm, latencies included."""
    table = Table(title="tokens/s against no speculation", box=box.SIMPLE_HEAD)
    names = ("at once", "tokens/s", "ratio", "smallest", "largest", "accept length")
    table.add_column("arm", no_wrap=True)
    for name in (*names, "TTFT ms", "TPOT ms"):
        table.add_column(name, justify="right")
    previous = None
    for entry in sorted(summary, key=lambda entry: entry["concurrency"]):
        if previous not in (None, entry["concurrency"]):
            table.add_section()
        previous = entry["concurrency"]
        ratio, length = entry["ratio"], entry["accept_length"]
        table.add_row(
            entry["label"],
            str(entry["concurrency"]),
            f"{entry['tokens_per_s']['median']:.1f}",
            *(f"{ratio[k]:.2f}" if ratio else "-" for k in ("median", "min", "max")),
            f"{length:.2f}" if length else "-",
            f"{entry['median_ttft_ms']:.0f}",
            f"{entry['median_tpot_ms']:.0f}",
        )
    Console(width=110).print(table)


def write_all(path: Path, *, readme: bool = False) -> None:
    """Print the table of a result file; write NAME.md and NAME.png beside it."""
    result = json.loads(path.read_text())
    print_table(result["summary"])
    markdown = to_markdown(result)
    path.with_suffix(".md").write_text(markdown)
    write_plot(result, path.with_suffix(".png"))
    if readme:
        update_readme(markdown)


def main() -> None:
    """Report on a result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--readme", action="store_true")
    options = parser.parse_args()
    write_all(options.result, readme=options.readme)


if __name__ == "__main__":
    main()
