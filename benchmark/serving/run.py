"""TETRIS against SGLang's own decoding under `bench_serving`: `make bench`.

Arms: no speculation, SGLang's EAGLE as a chain and as a tree of fixed shape, TETRIS,
and TETRIS without the hot-token map. Each round starts every arm's server once, in an
order that rotates, warms it up, and runs `python -m sglang.bench_serving` at every
concurrency. Only the measured server is alive, because an idle one takes processor
time. Speed is compared within a round, so that a machine that drifts does not favour an
arm; the spread is over rounds.

What TETRIS costs where drafts are worth nothing, told so or finding out by itself:

    python benchmark/serving/run.py --name floor --rounds 3 --output-len 128 \\
        --arms plain tetris-undrafted tetris-scrambled --num-prompts 2 8 32

Writes to results/: NAME.json (every run, with provenance), NAME.md, NAME.png.
"""

import argparse
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

import report
from sglang_tetris.tools.arms import (
    ARM_NAMES,
    COST_ARM_NAMES,
    DRAFTS,
    TETRIS_BUDGET,
    TETRIS_SHAPE,
    Shape,
    make_arm,
)
from sglang_tetris.tools.prepare_model import PreparedModels, prepare
from sglang_tetris.tools.provenance import provenance, utc_now
from sglang_tetris.tools.server_process import (
    ServerError,
    ServerProcess,
    exit_on_signals,
    running_server,
)

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PROMPTS = HERE / "prompts.json"
BENCH_TIMEOUT_S = 1800
WARM_UP_TOKENS = 16
METRICS = (
    *("output_throughput", "completed", "duration", "total_output_tokens"),
    *("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "median_e2e_latency_ms"),
    "accept_length",
)
console = Console()


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options; a wrong combination ends the program with a sentence."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument(
        "--num-prompts",
        type=int,
        nargs="+",
        default=[8, 24, 64],
        help="prompts per run, one number per concurrency",
    )
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=(*ARM_NAMES, *COST_ARM_NAMES),
        default=list(ARM_NAMES),
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--draft", choices=DRAFTS, default=DRAFTS[0])
    parser.add_argument("--tetris-budget", default=TETRIS_BUDGET)
    parser.add_argument(
        "--tetris-shape",
        type=int,
        nargs=3,
        metavar=("STEPS", "TOPK", "TOKENS"),
        default=[
            TETRIS_SHAPE.num_steps,
            TETRIS_SHAPE.topk,
            TETRIS_SHAPE.num_draft_tokens,
        ],
    )
    parser.add_argument("--name", default="serving", help="of the files in results/")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--readme",
        action="store_true",
        help="put the table into the README, between its marks",
    )
    options = parser.parse_args(arguments)
    if len(options.num_prompts) != len(options.concurrency):
        parser.error("--num-prompts needs one number per --concurrency")
    available = len(json.loads(PROMPTS.read_text()))
    if max(options.num_prompts) > available:
        parser.error(f"--num-prompts: prompts.json holds {available} prompts")
    return options


def write_dataset(model: Path, path: Path) -> list[str]:
    """Write the prompts, in the model's chat format, for `--dataset-name custom`.

    bench_serving's own `--apply-chat-template` deletes the tokenizer's bos token from
    the prompt; in this model's format that is the mark at which every turn begins.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = []
    with path.open("w") as file:
        for row in json.loads(PROMPTS.read_text()):
            user, assistant = (turn["value"] for turn in row["conversations"])
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": user}],
                add_generation_prompt=True,
                tokenize=False,
            )
            prompts.append(prompt)
            turns = [{"content": prompt}, {"content": assistant}]
            file.write(json.dumps({"conversations": turns}) + "\n")
    return prompts


def post(url: str, body: dict[str, object]) -> dict:
    """Return the JSON reply to a JSON request."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=BENCH_TIMEOUT_S) as reply:
        return json.load(reply)


def warm_up(server: ServerProcess, prompts: Sequence[str], concurrency: int) -> None:
    """Send one short request per slot, so that nothing is compiled while measuring."""
    params = {"temperature": 0, "max_new_tokens": WARM_UP_TOKENS, "ignore_eos": True}
    bodies = [
        {"text": prompt, "sampling_params": params} for prompt in prompts[:concurrency]
    ]
    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        list(pool.map(lambda body: post(f"{server.url}/generate", body), bodies))


def run_bench_serving(
    server: ServerProcess,
    models: PreparedModels,
    dataset: Path,
    output: Path,
    *,
    concurrency: int,
    num_prompts: int,
    output_len: int,
    seed: int,
) -> dict[str, object]:
    """Return bench_serving's metrics of one run.

    Raises:
        RuntimeError: it failed, or not every request was completed.
    """
    output.unlink(missing_ok=True)  # bench_serving appends
    command = [
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang"),
        *("--base-url", server.url, "--model", str(models.target)),
        *("--dataset-name", "custom", "--dataset-path", str(dataset)),
        *("--num-prompts", str(num_prompts), "--max-concurrency", str(concurrency)),
        *("--sharegpt-output-len", str(output_len), "--request-rate", "inf"),
        *("--seed", str(seed), "--warmup-requests", "1", "--flush-cache"),
        *("--output-file", str(output), "--disable-tqdm"),
    ]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BENCH_TIMEOUT_S,
    )
    if done.returncode != 0 or not output.exists():
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise RuntimeError(f"bench_serving failed ({done.returncode}):\n{tail}")
    result = json.loads(output.read_text().splitlines()[-1])
    if result["completed"] != num_prompts:
        raise RuntimeError(
            f"bench_serving completed {result['completed']} of {num_prompts} requests"
        )
    return {name: result.get(name) for name in METRICS}


def measure_arm(
    name: str,
    round_index: int,
    options: argparse.Namespace,
    models: PreparedModels,
    dataset: Path,
    prompts: Sequence[str],
) -> list[dict[str, object]]:
    """Start one arm's server, run every concurrency, stop it; one record per run."""
    steps, topk, tokens = options.tetris_shape
    arm = make_arm(
        name,
        models,
        dtype=options.dtype,
        draft=options.draft,
        tetris_shape=Shape(num_steps=steps, topk=topk, num_draft_tokens=tokens),
        tetris_budget=options.tetris_budget,
    )
    raw = dataset.parent
    records = []
    log_path = raw / f"{name}-{round_index}.log"
    with running_server(arm.flags, log_path=log_path) as server:
        warm_up(server, prompts, max(options.concurrency))
        for concurrency, num_prompts in zip(
            options.concurrency, options.num_prompts, strict=True
        ):
            metrics = run_bench_serving(
                server,
                models,
                dataset,
                raw / f"{name}-{round_index}-{concurrency}.jsonl",
                concurrency=concurrency,
                num_prompts=num_prompts,
                output_len=options.output_len,
                seed=options.seed,
            )
            records.append(
                {"round": round_index, "arm": name, "label": arm.label}
                | {"concurrency": concurrency, "num_prompts": num_prompts}
                | metrics
                | {"load_average": round(os.getloadavg()[0], 2)}
            )
            console.print(
                f"round {round_index}, {arm.label}, concurrency {concurrency}: "
                f"{metrics['output_throughput']:.1f} tokens/s"
            )
        with urllib.request.urlopen(f"{server.url}/server_info", timeout=60) as reply:
            state = json.load(reply)["internal_states"][0]
        for record in records:
            record["server_rss_mib"] = server.resident_bytes() // 2**20
            record["tetris"] = state.get("tetris")
    return records


def main(arguments: list[str] | None = None) -> int:
    """Measure, and write the results; 0, or 1 after a message on standard error."""
    options = parse_options(arguments)
    exit_on_signals()
    raw = RESULTS / "raw" / options.name
    raw.mkdir(parents=True, exist_ok=True)
    result: dict[str, object] = {"provenance": provenance()}
    result["settings"] = vars(options)
    try:
        models = prepare(report=console.print)
        dataset = raw / "prompts.jsonl"
        prompts = write_dataset(models.target, dataset)
        runs: list[dict[str, object]] = []
        for round_index in range(options.rounds):
            # Rotated: no arm is always the one that runs on a cold or a hot machine.
            turn = round_index % len(options.arms)
            for name in options.arms[turn:] + options.arms[:turn]:
                runs += measure_arm(
                    name, round_index, options, models, dataset, prompts
                )
    except KeyboardInterrupt:
        print("bench: interrupted; the server was stopped.", file=sys.stderr)
        return 130
    except (ServerError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    result["runs"] = runs
    result["summary"] = report.summarise(runs)
    result["provenance"]["finished"] = utc_now()
    path = RESULTS / f"{options.name}.json"
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")
    report.write_all(path, readme=options.readme)
    return 0


if __name__ == "__main__":
    sys.exit(main())
