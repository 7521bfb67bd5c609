"""`make exactness`: outputs with and without TETRIS, the full matrix on the real model.

    python benchmark/exactness/run.py [--prompts 64] [--tokens 32] [--dtype float32]

Temperature 0. Plain decoding answers once; then each draft (EAGLE, standalone) and
shape (chain, tree) at each budget. Answers are compared up to a first difference. In
float32 a difference counts as rounding only where plain decoding's two best logits at
that token are shown to lie within 1e-3; anything else is an error and the exit status
is 1. In other dtypes the share of identical answers is reported. The result is written
as JSON with its provenance.
"""

import argparse
import json
import random
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sglang_tetris.tools.prepare_model import default_cache_dir, prepare
from sglang_tetris.tools.provenance import provenance, utc_now
from sglang_tetris.tools.server_process import (
    ServerProcess,
    exit_on_signals,
    running_server,
)

BUDGETS = ("0", "1", "16", "1x", "3x", "auto", "1000")
SHAPES = {"chain": (3, 1, 4), "tree": (3, 2, 8)}
DRAFTS = ("eagle", "standalone")
ROUNDING_GAP = 1e-3
RESULTS = Path(__file__).parent / "results"
PROMPTS = Path(__file__).resolve().parents[1] / "serving" / "prompts.json"


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    """Return the JSON reply of a POST."""
    request = urllib.request.Request(
        f"{server.url}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=1800) as reply:
        return json.loads(reply.read() or b"null")


def answers(
    server: ServerProcess, prompts: list[list[int]], tokens: int
) -> list[dict[str, Any]]:
    """Return the greedy replies to all prompts, asked at once, from an empty cache."""
    urllib.request.urlopen(
        urllib.request.Request(f"{server.url}/flush_cache", method="POST"), timeout=60
    ).close()
    params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": params}
    replies: list[dict[str, Any]] = post(server, "/generate", body)
    return replies


def logit_gap(server: ServerProcess, input_ids: list[int]) -> float:
    """Return how far plain decoding's two best logits lie apart after `input_ids`."""
    reply = post(
        server,
        "/generate",
        {
            "input_ids": [input_ids],
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
            "return_logprob": True,
            "top_logprobs_num": 2,
        },
    )
    best, second = reply[0]["meta_info"]["output_top_logprobs"][0]
    gap: float = best[0] - second[0]
    return gap


def first_difference(mine: list[int], oracle: list[int]) -> int | None:
    """Return where two answers first differ, None if they do not."""
    if mine == oracle:
        return None
    pairs = zip(mine, oracle, strict=False)
    return next(
        (at for at, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(oracle))
    )


def load_prompts(target: Path, count: int) -> list[list[int]]:
    """Return the ids of `count` prompts of mixed kinds, through the chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    entries = json.loads(PROMPTS.read_text())
    texts = [entry["conversations"][0]["value"] for entry in entries]
    random.Random(0).shuffle(texts)
    if len(texts) < count:
        raise SystemExit(f"{PROMPTS} has {len(texts)} prompts, {count} were asked for")
    return [
        tokenizer.encode(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}],
                tokenize=False,
                add_generation_prompt=True,
            ),
            add_special_tokens=False,
        )
        for text in texts[:count]
    ]


def run_matrix(args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Return one row per draft, shape and budget."""
    models = prepare(default_cache_dir())
    prompts = load_prompts(models.target, args.prompts)
    common = [
        *("--model-path", str(models.target), "--dtype", args.dtype),
        *("--max-total-tokens", "40000", "--mem-fraction-static", "0.6"),
        "--disable-overlap-schedule",
    ]
    rows: list[dict[str, Any]] = []
    differences: list[tuple[dict[str, Any], list[int]]] = []
    total = 1 + len(DRAFTS) * len(SHAPES) * len(BUDGETS)
    with tempfile.TemporaryDirectory() as logs, Progress(console=console) as progress:
        task = progress.add_task("plain decoding", total=total)
        with running_server(common, log_path=Path(logs) / "plain.log") as plain:
            oracle = [r["output_ids"] for r in answers(plain, prompts, args.tokens)]
        progress.advance(task)
        for draft in DRAFTS:
            for shape, (steps, topk, width) in SHAPES.items():
                flags = [
                    *common,
                    *("--speculative-algorithm", "TETRIS"),
                    *("--speculative-draft-model-path", str(getattr(models, draft))),
                    *("--speculative-token-map", str(models.hot_tokens)),
                    *("--speculative-num-steps", str(steps)),
                    *("--speculative-eagle-topk", str(topk)),
                    *("--speculative-num-draft-tokens", str(width)),
                ]
                log = Path(logs) / f"{draft}-{shape}.log"
                with running_server(flags, log_path=log) as server:
                    for budget in BUDGETS:
                        progress.update(task, description=f"{draft} {shape} {budget}")
                        post(server, "/tetris/budget", {"draft_budget": budget})
                        replies = answers(server, prompts, args.tokens)
                        row = _row(draft, shape, budget, replies)
                        rows.append(row)
                        for prompt, reply, wanted in zip(
                            prompts, replies, oracle, strict=True
                        ):
                            at = first_difference(reply["output_ids"], wanted)
                            if at is None:
                                row["identical"] += 1
                            else:
                                differences.append((row, [*prompt, *wanted[:at]]))
                        progress.advance(task)
        if differences and args.dtype == "float32":
            with running_server(common, log_path=Path(logs) / "gaps.log") as plain:
                for row, context in differences:
                    within = logit_gap(plain, context) <= ROUNDING_GAP
                    row["rounding" if within else "wrong"] += 1
        elif differences:
            for row, _ in differences:
                row["different"] += 1
    return rows


def _row(
    draft: str, shape: str, budget: str, replies: list[dict[str, Any]]
) -> dict[str, Any]:
    metas = [reply["meta_info"] for reply in replies]
    rounds = sum(meta["spec_verify_ct"] for meta in metas)
    correct = sum(meta["spec_num_correct_drafts"] for meta in metas)
    return {
        "draft": draft,
        "shape": shape,
        "budget": budget,
        "prompts": len(replies),
        "identical": 0,
        "rounding": 0,
        "wrong": 0,
        "different": 0,
        "accept_length": (rounds + correct) / rounds,
    }


def main(arguments: list[str] | None = None) -> int:
    """Compare, print the table and write the result; 1 where an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args(arguments)
    console = Console()
    exit_on_signals()  # so that no server stays behind
    origin = provenance()
    rows = run_matrix(args, console)
    table = Table(title=f"Answers equal to plain decoding's, {args.dtype}")
    names = ("draft", "shape", "budget", "prompts", "identical", "rounding", "wrong")
    names += ("different", "accept_length")
    for name in names:
        table.add_column(name.replace("_", " "))
    for row in rows:
        cells = [row[name] for name in names]
        table.add_row(*(f"{c:.2f}" if isinstance(c, float) else str(c) for c in cells))
    console.print(table)
    output = args.output or RESULTS / f"{args.dtype}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    origin["finished"] = utc_now()
    settings = {"prompts": args.prompts, "tokens": args.tokens, "dtype": args.dtype}
    record = {"provenance": origin, "settings": settings, "rows": rows}
    output.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"written to {output}")
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
