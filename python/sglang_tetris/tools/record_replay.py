"""Record what the simulator replays: a draft tree at every position of real answers.

    python -m sglang_tetris.tools.record_replay OUTPUT.replay.jsonl.gz [--prompts FILE]

Two servers answer the same prompts one after the other, greedily and at temperature 0.8
with a seed: one drafts a chain of 8, one a tree of 4 levels and 3 branches. Both draft
in every round and verify nothing, so each token of an answer has its tree, and what the
target chose is the answer itself. The two trees of a position are joined into one.

    header  format, provenance, max_chain, tree, requests: kind, sampling_class,
            prompt_tokens of each
    line    r (request), p (tokens emitted before), parents and probs of the tree, path
            (its nodes that the answer goes along, from the root down)

No token and no text is in the file.
"""

import argparse
import gzip
import json
import sys
import tempfile
import urllib.request
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from sglang_tetris.core.sampling_classes import sampling_class
from sglang_tetris.tools.arms import DRAFTS, TETRIS, Shape, make_arm
from sglang_tetris.tools.prepare_model import PreparedModels, prepare
from sglang_tetris.tools.server_process import (
    ServerError,
    exit_on_signals,
    running_server,
)

FORMAT = "sglang_tetris.replay/1"
CHAIN = Shape(num_steps=8, topk=1, num_draft_tokens=9)
TREE = Shape(num_steps=4, topk=3, num_draft_tokens=31)
TEMPERATURES = (0.0, 0.8)
TIMEOUT_S = 3600
# A node that is reached less often than this is not worth its bytes.
LEAST_SURVIVAL = 1e-3

Record = dict[str, Any]


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
        return read_trace(trace)


def read_trace(path: Path) -> dict[str, list[Record]]:
    """Return the entries of a trace by request id, in the order of their positions."""
    entries = defaultdict(list)
    with path.open(encoding="utf-8") as lines:
        next(lines)
        for line in lines:
            for entry in json.loads(line)["requests"]:
                entries[entry["rid"]].append(entry)
    return dict(entries)


def write(
    path: Path,
    options: Any,
    prompts: list[Record],
    chains: dict[str, list[Record]],
    tree_rounds: dict[str, list[Record]],
) -> None:
    """Join both recordings and write the file."""
    requests, lines = [], []
    for temperature in TEMPERATURES:
        for prompt in prompts:
            rid = _rid(prompt, temperature)
            joined = join_request(chains[rid], tree_rounds[rid])
            for line in joined:
                lines.append({"r": len(requests), **line})
            requests.append(
                {
                    "kind": prompt["id"].split("-")[0],
                    "sampling_class": sampling_class(temperature, transformed=False),
                    "num_tokens": len(joined),
                }
            )
    header = {
        "format": FORMAT,
        "provenance": {
            "command": "python -m sglang_tetris.tools.record_replay",
            "model": "SmolLM2-135M-Instruct",
            "draft": options.draft,
            "temperatures": TEMPERATURES,
            "sglang": metadata.version("sglang"),
        },
        "max_chain": CHAIN.num_steps,
        "tree": {"num_steps": TREE.num_steps, "topk": TREE.topk},
        "requests": requests,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # No time stamp in the archive: the same recording gives the same bytes.
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        for line in (header, *lines):
            text = json.dumps(line, separators=(",", ":"))
            file.write((text + "\n").encode())


def join_request(chains: list[Record], trees: list[Record]) -> list[Record]:
    """Return one line per position at which both recordings drafted.

    Raises RuntimeError where the two servers did not emit the same text.
    """
    by_position = {entry["position"]: entry for entry in trees}
    emitted = {entry["position"]: entry["emitted"][0] for entry in chains}
    lines = []
    for chain in chains:
        position = chain["position"]
        tree = by_position.get(position)
        if tree is None:
            continue
        if tree["emitted"] != chain["emitted"]:
            raise RuntimeError(f"two texts at {chain['rid']}, position {position}")
        following = []
        while position + len(following) in emitted:
            following.append(emitted[position + len(following)])
        lines.append({"p": position, **join_trees(chain, tree, following)})
    return lines


def join_trees(chain: Record, tree: Record, following: list[int]) -> Record:
    """Return the union of two trees of one position, and the path through it."""
    children: list[dict[int, int]] = [{}]
    parents: list[int] = []
    probs: list[float] = []
    survival: list[float] = []
    for source in (tree, chain):
        places: list[int] = []
        for token, parent, prob in zip(
            source["tokens"], source["parents"], source["probs"], strict=True
        ):
            above = -1 if parent < 0 else places[parent]
            reached = prob * (1.0 if above < 0 else survival[above])
            if above == -2 or (reached < LEAST_SURVIVAL and source is tree):
                places.append(-2)  # left out, and all below it
                continue
            known = children[above + 1].get(token)
            if known is None:
                known = len(parents)
                children[above + 1][token] = known
                children.append({})
                parents.append(above)
                probs.append(prob)
                survival.append(reached)
            places.append(known)
    path, at = [], 0
    for token in following:
        node = children[at].get(token)
        if node is None:
            break
        path.append(node)
        at = node + 1
    return {"parents": parents, "probs": probs, "path": path}


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
