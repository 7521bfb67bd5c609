"""From a server's trace to a recording that any policy can be replayed on.

A trace (adapter.trace) has the trees of the rounds that were run. A recording
(core.replay) has one at every position, since another policy stops elsewhere: such a
trace comes from a server that drafts in every round and verifies nothing. Two of them,
of the same answers but of different trees, can be joined.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from sglang_tetris.core.replay import (
    TRACE_FORMAT,
    Replay,
    ReplayHeader,
    ReplayRequest,
    replay_of,
)

# A node that is reached less often than this is not worth its bytes.
LEAST_SURVIVAL = 1e-3

Record = dict[str, Any]
# Tokens emitted before; parents, probs, path.
Position = tuple[int, list[int], list[float], list[int]]


def read_trace(path: Path) -> tuple[Record, dict[str, list[Record]]]:
    """Return a trace's header, and its entries by request id, positions ascending.

    ValueError names the file and what is wrong with it.
    """
    entries = defaultdict(list)
    with path.open(encoding="utf-8") as lines:
        try:
            header: Record = json.loads(next(lines, ""))
            if header["format"] != TRACE_FORMAT:
                raise ValueError(f"its format is {header['format']!r}")
            for line in lines:
                for entry in json.loads(line)["requests"]:
                    entries[entry["rid"]].append(entry)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no trace: {error}") from None
    return header, dict(entries)


def replay_of_trace(path: Path) -> Replay:
    """Return the recording that a server's own trace holds.

    ValueError unless the server drafted at every position and wrote down tokens: no
    other policy could be followed through it.
    """
    header, entries = read_trace(path)
    requests, positions = [], []
    for rid, rounds in entries.items():
        first = rounds[0]
        places = [entry["position"] for entry in rounds]
        dense = places == list(range(places[0], places[0] + len(places)))
        if not dense or "tokens" not in first:
            raise ValueError(
                f"{path} cannot be replayed: request {rid} has no tree at each of its "
                "tokens; record with --tetris-budget 0 and --tetris-config "
                '{"draft_always": true, "trace_tokens": true}'
            )
        for line in join_request(rounds, rounds):
            positions.append((len(requests), *line))
        requests.append(
            ReplayRequest(
                kind="request",
                sampling_class=first["sampling_class"],
                prompt_tokens=first["prompt_tokens"],
            )
        )
    return replay_of(
        ReplayHeader(
            requests=tuple(requests),
            max_chain=header["num_steps"],
            num_steps=header["num_steps"],
            topk=header["topk"],
            provenance={"trace": path.name, "draft": header["draft"]},
        ),
        positions,
    )


def join_request(chains: list[Record], trees: list[Record]) -> list[Position]:
    """Return what `write_replay` takes, of the positions at which both drafted.

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
        lines.append((position, *join_trees(chain, tree, following)))
    return lines


def join_trees(
    chain: Record, tree: Record, following: list[int]
) -> tuple[list[int], list[float], list[int]]:
    """Return parents and probs of the union of two trees of one position, and the path.

    The path are its nodes that agree with the tokens that follow in the text.
    """
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
    return parents, probs, path
