"""Serve a real model with TETRIS, answer 16 chats at once, and compare: `make demo`.

One server at a time, each in a process tree of its own that is stopped before the next
one starts, on Ctrl-C and on failure too: TETRIS with a fixed budget, TETRIS that finds
its own, no speculation, SGLang's EAGLE with a fixed shape. Same model, prompts and
temperature 0. One pass each is a demonstration; `make bench` measures.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from chat_stream import Answer, Prompt, load_prompts, stream_all
from sglang_tetris.tools.arms import (
    CHAIN,
    DRAFTS,
    PLAIN,
    TETRIS,
    TETRIS_AUTO,
    TETRIS_BUDGET,
    Arm,
    make_arm,
)
from sglang_tetris.tools.prepare_model import prepare
from sglang_tetris.tools.server_process import (
    ServerError,
    exit_on_signals,
    running_server,
)

WARM_UP_TOKENS = 8
SHOWN_ANSWERS = 4  # one of each kind
# A pipe or a log file has no width; 80 columns would cut the tables.
console = Console(width=None if sys.stdout.isatty() else 110)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one arm did: its answers and its speed over all of them.

    sent_s: when the requests were sent, on the clock of `time.perf_counter`.
    """

    arm: Arm
    sent_s: float
    answers: list[Answer]

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / max(answer.finished_s for answer in self.answers)

    @property
    def first_answer_s(self) -> float:
        """When the first token of an answer arrived, on the same clock as sent_s."""
        return self.sent_s + min(answer.first_token_s for answer in self.answers)


def stream_with_bar(
    url: str, arm: Arm, prompts: Sequence[Prompt], max_new_tokens: int
) -> list[Answer]:
    """Return the answers; the bar counts tokens, and full length for ended answers."""
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(),
        TextColumn("{task.fields[tokens]} tokens, {task.fields[done]} answers"),
        TimeElapsedColumn(),
    )
    received = [0] * len(prompts)
    finished = [False] * len(prompts)
    with Progress(*columns, console=console) as progress:
        total = len(prompts) * max_new_tokens
        bar = progress.add_task(arm.label, total=total, tokens=0, done=0)

        def on_tokens(index: int, new_tokens: int, done: bool) -> None:
            received[index] += new_tokens
            finished[index] = done
            completed = sum(
                max_new_tokens if end else count
                for count, end in zip(received, finished, strict=True)
            )
            progress.update(
                bar, completed=completed, tokens=sum(received), done=sum(finished)
            )

        return stream_all(
            url, prompts, max_new_tokens=max_new_tokens, on_tokens=on_tokens
        )


def run_arm(
    arm: Arm,
    loading: Future[list[Prompt]],
    num_requests: int,
    max_new_tokens: int,
    log_dir: Path,
) -> Outcome:
    """Start the arm's server, warm it up, stream all answers, and stop it.

    Args:
        loading: gives the prompts to measure, then as many others for the warm-up.
    """
    with contextlib.ExitStack() as stack:
        with console.status(f"starting the server: {arm.label}"):
            server = stack.enter_context(
                running_server(arm.flags, log_path=log_dir / f"{arm.name}.log")
            )
            prompts = loading.result()
            stream_all(
                server.url, prompts[num_requests:], max_new_tokens=WARM_UP_TOKENS
            )
        measured = prompts[:num_requests]
        sent_s = time.perf_counter()
        answers = stream_with_bar(server.url, arm, measured, max_new_tokens)
    return Outcome(arm=arm, sent_s=sent_s, answers=answers)


def print_requests(outcome: Outcome, prompts: Sequence[Prompt]) -> None:
    """Print one row per request of the TETRIS arm, and their sum."""
    table = Table(title=f"{outcome.arm.label}: {len(prompts)} requests at once")
    table.add_column("kind")
    table.add_column("prompt", no_wrap=True, max_width=34)
    names = ("tokens", "rounds", "accept length", "drafts verified", "correct")
    for name in names:
        table.add_column(name, justify="right")
    for prompt, answer in zip(prompts, outcome.answers, strict=True):
        table.add_row(
            prompt.kind,
            prompt.question.replace("\n", " "),
            str(answer.num_tokens),
            str(answer.num_rounds),
            f"{answer.accept_length:.2f}",
            str(answer.num_verify_drafts),
            str(answer.num_correct_drafts),
        )
    rounds = sum(answer.num_rounds for answer in outcome.answers)
    verified = sum(answer.num_verify_drafts for answer in outcome.answers)
    correct = sum(answer.num_correct_drafts for answer in outcome.answers)
    table.add_section()
    table.add_row(
        "all",
        "",
        str(outcome.num_tokens),
        str(rounds),
        f"{(correct + rounds) / rounds:.2f}" if rounds else "-",
        str(verified),
        str(correct),
    )
    console.print(table)


def print_answers(outcome: Outcome, prompts: Sequence[Prompt]) -> None:
    """Print a few answers in full."""
    pairs = list(zip(prompts, outcome.answers, strict=True))
    for prompt, answer in pairs[:SHOWN_ANSWERS]:
        console.print(f"\n[bold]{prompt.question}[/bold]", highlight=False)
        console.print(answer.text.strip(), highlight=False, markup=False)
    console.print()


def print_comparison(outcomes: Sequence[Outcome]) -> None:
    """Print tokens per second of all arms and say which is fastest."""
    by_name = {outcome.arm.name: outcome for outcome in outcomes}
    plain = by_name[PLAIN].tokens_per_s
    table = Table(title="all requests together")
    table.add_column("arm")
    for name in ("tokens", "tokens/s", "against no speculation"):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        table.add_row(
            outcome.arm.label,
            str(outcome.num_tokens),
            f"{outcome.tokens_per_s:.1f}",
            f"{outcome.tokens_per_s / plain:.2f} x",
        )
    console.print(table)
    fastest, second = sorted(outcomes, key=lambda o: -o.tokens_per_s)[:2]
    lead = fastest.tokens_per_s / second.tokens_per_s - 1
    console.print(
        f"Fastest in this run: [bold]{fastest.arm.label}[/bold], "
        f"{fastest.tokens_per_s:.1f} tokens/s, {lead:.1%} ahead of "
        f"{second.arm.label}."
    )
    ours = [by_name[name] for name in (TETRIS, TETRIS_AUTO) if name in by_name]
    same = sum(
        answer.text == plain_answer.text
        for outcome in ours
        for answer, plain_answer in zip(
            outcome.answers, by_name[PLAIN].answers, strict=True
        )
    )
    console.print(
        f"Answers of TETRIS that equal those without speculation: {same} of "
        f"{sum(len(outcome.answers) for outcome in ours)} "
        "(in bfloat16 rounding can part them)."
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the demonstration; 0, or 1 after one sentence on standard error."""
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--draft", choices=DRAFTS, default=DRAFTS[0])
    parser.add_argument("--tetris-budget", default=TETRIS_BUDGET)
    options = parser.parse_args(arguments)
    exit_on_signals()
    log_dir = Path(tempfile.mkdtemp(prefix="tetris-demo-"))
    try:
        models = prepare(report=console.print)
        with ThreadPoolExecutor(max_workers=1) as pool:
            loading = pool.submit(load_prompts, models.target, 2 * options.requests)
            outcomes = []
            names = [TETRIS, TETRIS_AUTO, PLAIN, CHAIN]
            if options.tetris_budget == "auto":
                names.remove(TETRIS_AUTO)
            for name in names:
                arm = make_arm(
                    name,
                    models,
                    dtype=options.dtype,
                    draft=options.draft,
                    tetris_budget=options.tetris_budget,
                )
                outcomes.append(
                    run_arm(
                        arm,
                        loading,
                        options.requests,
                        options.max_new_tokens,
                        log_dir,
                    )
                )
                if name == TETRIS:
                    waited = outcomes[0].first_answer_s - started
                    console.print(f"The first answer began {waited:.0f} s after start.")
                    prompts = loading.result()[: options.requests]
                    print_requests(outcomes[0], prompts)
                    print_answers(outcomes[0], prompts)
            print_comparison(outcomes)
    except KeyboardInterrupt:
        print("demo: interrupted; every server was stopped.", file=sys.stderr)
        return 130
    except (ServerError, RuntimeError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    console.print(
        f"{time.perf_counter() - started:.0f} s in all; server logs: {log_dir}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
