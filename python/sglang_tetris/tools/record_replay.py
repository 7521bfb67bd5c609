"""Record what the simulator replays: a draft tree at every position of real answers.

    python -m sglang_tetris.tools.record_replay OUTPUT.replay.jsonl.gz [--prompts FILE]

Two servers answer the same prompts one after the other, greedily and at temperature 0.8
with a seed: one drafts a chain of 8, one a tree of 4 levels and 3 branches. Both draft
in every round and verify nothing, so each token of an answer has its tree, and what the
target chose is the answer itself. The two trees of a position are joined into one.
core.replay says how that is written; neither tokens nor text are.
"""

import argparse
import json
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from sglang_tetris.core.replay import ReplayHeader, ReplayRequest, write_replay
from sglang_tetris.core.sampling_classes import sampling_class
from sglang_tetris.tools.arms import DRAFTS, TETRIS, Shape, make_arm
from sglang_tetris.tools.prepare_model import PreparedModels, prepare
from sglang_tetris.tools.server_process import (
    ServerError,
    exit_on_signals,
    running_server,
)
from sglang_tetris.tools.trace_replay import Record, join_request, read_trace

CHAIN = Shape(num_steps=8, topk=1, num_draft_tokens=9)
TREE = Shape(num_steps=4, topk=3, num_draft_tokens=31)
TEMPERATURES = (0.0, 0.8)
TIMEOUT_S = 3600


def main(arguments: list[str] | None = None) -> int:
    """Record, join and write; 0, or 1 after a message on standard error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="ShareGPT JSON")
    parser.add_argument("--draft", choices=DRAFTS, default=DRAFTS[0])
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--concurrency", type=int, default=16)
    options = parser.parse_args(arguments)
    exit_on_signals()
    prompts = json.loads(options.prompts.read_text(encoding="utf-8"))
    try:
        models = prepare()
        chains, tree_rounds = (
            record(shape, models, prompts, options) for shape in (CHAIN, TREE)
        )
    except KeyboardInterrupt:
        return 130
    except (ServerError, OSError, RuntimeError) as error:
        print(f"record_replay: {error}", file=sys.stderr)
        return 1
    write(options.output, options, prompts, chains, tree_rounds)
    print(f"wrote {options.output}: {sum(map(len, chains.values()))} positions")
    return 0


def record(
    shape: Shape, models: PreparedModels, prompts: list[Record], options: Any
) -> dict[str, list[Record]]:
    """Return, per request, one trace entry per position, as one server drafted them."""
    arm = make_arm(
        TETRIS, models, draft=options.draft, tetris_shape=shape, tetris_budget="0"
    )
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        config = {"draft_always": True, "trace_tokens": True}
        flags = (
            *arm.flags,
            *("--tetris-trace", str(trace), "--tetris-config", json.dumps(config)),
            "--enable-deterministic-inference",
        )
        log = Path(folder) / "server.log"
        # The pool outside: when this is interrupted, the server ends first, and what
        # waits in the pool fails at once.
        with ThreadPoolExecutor(options.concurrency) as pool:
            with running_server(flags, log_path=log) as server:
                url = f"{server.url}/v1/chat/completions"
                bodies = _bodies(prompts, options.max_tokens)
                list(pool.map(lambda body: _post(url, body), bodies))
        return read_trace(trace)[1]


def write(
    path: Path,
    options: Any,
    prompts: list[Record],
    chains: dict[str, list[Record]],
    tree_rounds: dict[str, list[Record]],
) -> None:
    """Join both recordings and write the file."""
    requests, positions = [], []
    for temperature in TEMPERATURES:
        for prompt in prompts:
            rid = _rid(prompt, temperature)
            for line in join_request(chains[rid], tree_rounds[rid]):
                positions.append((len(requests), *line))
            requests.append(
                ReplayRequest(
                    kind=prompt["id"].split("-")[0],
                    sampling_class=sampling_class(temperature, transformed=False),
                    prompt_tokens=chains[rid][0]["prompt_tokens"],
                )
            )
    header = ReplayHeader(
        requests=tuple(requests),
        max_chain=CHAIN.num_steps,
        num_steps=TREE.num_steps,
        topk=TREE.topk,
        provenance={
            "command": "python -m sglang_tetris.tools.record_replay",
            "model": "SmolLM2-135M-Instruct",
            "draft": options.draft,
            "temperatures": TEMPERATURES,
            "sglang": metadata.version("sglang"),
        },
    )
    write_replay(path, header, positions)


def _bodies(prompts: list[Record], max_tokens: int) -> list[Record]:
    return [
        {
            "model": "default",
            "messages": [
                {"role": "user", "content": prompt["conversations"][0]["value"]}
            ],
            "rid": _rid(prompt, temperature),
            "temperature": temperature,
            "seed": 1,
            "max_tokens": max_tokens,
        }
        for temperature in TEMPERATURES
        for prompt in prompts
    ]


def _rid(prompt: Record, temperature: float) -> str:
    return f"{prompt['id']}-{temperature}"


def _post(url: str, body: Record) -> Record:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        answer: Record = json.load(reply)
        return answer


if __name__ == "__main__":
    sys.exit(main())
