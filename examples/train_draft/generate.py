"""Let the target answer the prompts and keep tokens and features, in shards.

    python examples/train_draft/generate.py --split train --workers 2 --worker 0 &
    python examples/train_draft/generate.py --split train --workers 2 --worker 1
    python examples/train_draft/generate.py --split held-out --slots 96

Each shard holds whole sequences: token ids, the prompt's length, the kind, the
temperature, and the target's hidden states after the final norm (float16), one per
token. Ctrl-C or SIGTERM keeps what the running answers have so far; started again,
it goes on with the prompts that are left.
A job is a dict with "index", "kind", "prompt" (ids), "temperature" and "limit" (of
new tokens).
Training: half greedy, half at temperature 0.8. Held out: greedy.
"""

import argparse
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from batched_target import BatchedTarget
from prompts import Prompt, build_prompts
from tqdm import tqdm
from transformers import AutoTokenizer

from sglang_tetris.tools.prepare_model import TARGET_NAME, default_cache_dir

# Answer lengths in tokens and their shares: mostly short, some long, so that the
# draft also sees distant positions.
LENGTHS, SHARES = (96, 144, 224, 448), (0.35, 0.4, 0.19, 0.06)
HELD_OUT_LENGTH = 128
SHARD_SEQUENCES = 64

Job = dict[str, Any]


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Return the prompt's ids, through the chat template as a server applies it."""
    if not prompt.messages:
        return list(tokenizer.encode(prompt.raw))
    messages = [{"role": role, "content": text} for role, text in prompt.messages]
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def choose(hidden: torch.Tensor, heat: torch.Tensor, target: BatchedTarget) -> Any:
    """Return one token per row: the arg-max, or a sample where heat > 0."""
    logits = target.logits(hidden)
    best = logits.argmax(-1)
    warm = heat > 0
    if warm.any():
        shares = (logits[warm] / heat[warm, None]).softmax(-1)
        best[warm] = torch.multinomial(shares, 1)[:, 0]
    return best


def generate(
    target: BatchedTarget,
    jobs: list[Job],
    stop_id: int,
    bar: Any,
    enough: Callable[[], bool],
) -> Iterator[Job]:
    """Answer the jobs, giving each back when it is done, with "ids" and "hidden".

    Once `enough()`, the running ones are given back as far as they got.
    """
    slots = target.lengths.numel()
    running: dict[int, Job] = {}
    waiting = list(reversed(jobs))
    tokens = torch.zeros(slots, dtype=torch.int64)
    heat = torch.zeros(slots)
    shared = target.shared

    def take(slot: int, token: int) -> Job | None:
        job = running[slot]
        job["ids"].append(token)
        bar.update()
        new = len(job["ids"]) - len(job["prompt"])
        if token != stop_id and new < job["limit"] and not enough():
            return None
        del running[slot]
        # The last token was never fed: it has no feature of its own.
        job["hidden"] = torch.cat([h.half() for h in job.pop("rows")])
        return job

    while running or (waiting and not enough()):
        free = [slot for slot in range(slots) if slot not in running]
        fed = {}
        if waiting and (len(free) >= 8 or not running):
            batch = [waiting.pop() for _ in free[: min(8, len(waiting))]]
            # Prompts without the shared prefix wait for a batch of their own.
            usual = [j for j in batch if j["prompt"][: len(shared)] == shared]
            if usual and len(usual) < len(batch):
                waiting += [job for job in batch if job not in usual]
                batch = usual
            prompts = [job["prompt"] for job in batch]
            free = free[: len(batch)]
            for slot, job, rows in zip(
                free, batch, target.prefill(free, prompts), strict=True
            ):
                job["ids"], job["rows"] = list(job["prompt"]), [rows]
                running[slot], heat[slot] = job, job["temperature"]
                fed[slot] = rows[-1]
        else:
            rows = target.decode(tokens)
            fed = {slot: rows[slot] for slot in running}
            for slot, job in running.items():
                job["rows"].append(rows[slot : slot + 1])
            # An unused slot still computes: keep it at a cheap, valid place.
            target.lengths[free] = 0
        places = list(fed)
        tokens[places] = choose(torch.stack([*fed.values()]), heat[places], target)
        for slot in places:
            if (job := take(slot, int(tokens[slot]))) is not None:
                yield job


def save_shard(jobs: list[Job], path: Path) -> None:
    """Write finished jobs, atomically."""
    keep = ("index", "kind", "temperature", "hidden")
    records = [
        {
            **{name: job[name] for name in keep},
            "ids": torch.tensor(job["ids"], dtype=torch.int32),
            "prompt_tokens": len(job["prompt"]),
        }
        for job in jobs
    ]
    torch.save(records, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def make_jobs(tokenizer: Any, options: argparse.Namespace) -> list[Job]:
    """Return this worker's share of the split; the same at every start."""
    train = options.split == "train"
    prompts = build_prompts(held_out=not train)
    if not train:
        prompts = prompts[: 4 * options.prompts_per_kind]
    rng = random.Random(options.split)
    jobs: list[Job] = []
    for index, prompt in enumerate(prompts):
        heat, limit = rng.choice((0.0, 0.8)), rng.choices(LENGTHS, SHARES)[0]
        jobs.append(
            {
                "index": index,
                "prompt": encode(tokenizer, prompt),
                "kind": prompt.kind,
                "temperature": heat if train else 0.0,
                "limit": limit if train else HELD_OUT_LENGTH,
            }
        )
    return jobs[options.worker :: options.workers]


def main() -> None:
    """Generate until the wanted number of tokens is there, or every prompt is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--split", choices=("train", "held-out"), required=True)
    parser.add_argument("--tokens", type=int, default=170_000, help="of all workers")
    parser.add_argument("--prompts-per-kind", type=int, default=24)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--data", type=Path, default=Path("build/draft_data"))
    parser.add_argument(
        "--target", type=Path, default=default_cache_dir() / TARGET_NAME
    )
    options = parser.parse_args()
    folder = options.data / options.split
    folder.mkdir(parents=True, exist_ok=True)
    # One thread a worker: two threads wait for each other at every small product.
    torch.set_num_threads(1)
    torch.manual_seed(int(time.time()))
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    jobs = make_jobs(tokenizer, options)
    old = sorted(folder.glob(f"worker{options.worker}_*.pt"))
    records = [record for path in old for record in torch.load(path)]
    finished = {record["index"] for record in records}
    count = sum(len(r["ids"]) - r["prompt_tokens"] for r in records)
    del records
    wanted = options.tokens // options.workers
    if options.split == "held-out":
        wanted = len(jobs) * HELD_OUT_LENGTH
    jobs = [job for job in jobs if job["index"] not in finished]
    target = BatchedTarget(options.target, slots=options.slots, max_tokens=704)
    first, second = (
        encode(tokenizer, Prompt(kind="chat", messages=(("user", text),)))
        for text in "ab"
    )
    target.share(
        first[: [a == b for a, b in zip(first, second, strict=False)].index(False)]
    )
    stops: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: stops.append(received))
    shard: list[Job] = []
    number = len(old)
    with tqdm(total=wanted, initial=count, unit="tok", desc=options.split) as bar:

        def enough() -> bool:
            return bool(stops) or bar.n >= wanted

        for job in generate(target, jobs, tokenizer.eos_token_id, bar, enough):
            shard.append(job)
            if len(shard) == SHARD_SEQUENCES:
                save_shard(shard, folder / f"worker{options.worker}_{number:03d}.pt")
                shard, number = [], number + 1
    if shard:
        save_shard(shard, folder / f"worker{options.worker}_{number:03d}.pt")
    print(f"{bar.n} generated tokens in {folder}")


if __name__ == "__main__":
    main()
