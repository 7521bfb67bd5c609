"""Recordings that any policy can be replayed on: a draft tree at every position.

JSON lines, gzipped where the name ends in `.gz`. The first line is the header

    {"format": "sglang_tetris.replay/1", "provenance": {...}, "max_chain": 8,
     "tree": {"num_steps": 4, "topk": 3},
     "requests": [{"kind": "chat", "sampling_class": 0, "prompt_tokens": 57}, ...]}

and every other line one position of one request, requests and positions ascending:

    {"r": 0, "p": 12, "parents": [-1, -1, 0], "probs": [0.61, 0.2, 0.5], "path": [0, 2]}

p counts the tokens already emitted, the anchor being the last of them. `parents` and
`probs` are those of `DraftTrees`, as the draft model gave them. `path` holds the nodes,
from the root down, that agree with what the target emitted next. Positions are dense:
a round at p that accepts a drafts emits a + 1 tokens and goes on at p + a + 1, so any
way of trimming can be followed exactly. Verification never changes the text. A
request's last position is the one before its last token.

Not decided here: what is verified, and what it costs (the simulator).
"""

import gzip
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from sglang_tetris.core.errors import check_count

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
# Request, tokens emitted before; parents, probs, path.
Position = tuple[int, int, Sequence[int], Sequence[float], Sequence[int]]

FORMAT = "sglang_tetris.replay/1"
# Of `--tetris-trace`, from which recordings are made.
TRACE_FORMAT = "sglang_tetris.trace/1"
# Of requests whose recording does not say it.
_PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """One recorded request.

    kind            sort of prompt: chat, code, ...
    sampling_class  0 = greedy; other numbers as the recorder counts them
    prompt_tokens   tokens ahead of the first emitted one
    """

    kind: str
    sampling_class: int
    prompt_tokens: int

    def __post_init__(self) -> None:
        check_count("sampling_class", self.sampling_class)
        check_count("prompt_tokens", self.prompt_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayHeader:
    """What the first line says.

    max_chain        levels of the greedy chain: always the most probable child
    num_steps, topk  the tree that is recorded beside the chain
    provenance       where it was recorded, as JSON values
    """

    requests: tuple[ReplayRequest, ...]
    max_chain: int
    num_steps: int
    topk: int
    provenance: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("max_chain", "num_steps", "topk"):
            check_count(name, getattr(self, name), minimum=1)

    def to_json(self) -> str:
        """Return the first line, without its end."""
        return json.dumps(
            {
                "format": FORMAT,
                "provenance": dict(self.provenance),
                "max_chain": self.max_chain,
                "tree": {"num_steps": self.num_steps, "topk": self.topk},
                "requests": [asdict(request) for request in self.requests],
            }
        )

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Read the first line; ValueError for anything that is not one."""
        try:
            fields = json.loads(line)
            if fields["format"] != FORMAT:
                raise ValueError(f'format must be "{FORMAT}", got {fields["format"]!r}')
            return cls(
                requests=tuple(
                    ReplayRequest(
                        kind=entry["kind"],
                        sampling_class=entry["sampling_class"],
                        prompt_tokens=entry.get("prompt_tokens", _PROMPT_TOKENS),
                    )
                    for entry in fields["requests"]
                ),
                max_chain=fields["max_chain"],
                num_steps=fields["tree"]["num_steps"],
                topk=fields["tree"]["topk"],
                provenance=fields.get("provenance", {}),
            )
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"the first line is no replay header: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """A recording in memory. P positions, R requests, W the largest tree's nodes.

    row_starts       [R + 1] int64, request r owns rows row_starts[r] to [r + 1]
    first_positions  [R] int64, tokens emitted at the request's first row
    parents          [P, W] int64, -1 = child of the anchor, and at padding
    probs            [P, W] float32, 0 at padding
    num_nodes        [P] int64
    is_correct       [P, W] bool, whether the node is on the row's path
    """

    header: ReplayHeader
    row_starts: Ints
    first_positions: Ints
    parents: Ints
    probs: Floats
    num_nodes: Ints
    is_correct: npt.NDArray[np.bool_]


def write_replay(
    path: Path,
    header: ReplayHeader,
    positions: Iterable[Position],
) -> None:
    """Write a recording; `positions` yields (r, p, parents, probs, path) in order.

    Probabilities are rounded to six digits. The same recording gives the same bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _written(path) as file:
        file.write(header.to_json() + "\n")
        for request, position, parents, probs, on_path in positions:
            line = {
                "r": request,
                "p": position,
                "parents": list(parents),
                "probs": [round(float(prob), 6) for prob in probs],
                "path": list(on_path),
            }
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def read_replay(path: Path) -> Replay:
    """Read and check a recording; ValueError names the file and the line."""
    with _read(path) as file:
        lines = enumerate(file, start=1)
        try:
            header = ReplayHeader.from_json(next(lines, (1, ""))[1])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return _packed(header, list(_parsed(path, header, lines)))


def replay_of(header: ReplayHeader, positions: Iterable[Position]) -> Replay:
    """Check and pack positions, as `write_replay` takes them; ValueError names one."""
    kept = list(positions)
    last = (-1, 0)
    for row in kept:
        fault = _fault(header, last, row)
        if fault:
            raise ValueError(fault)
        last = row[:2]
    if last[0] != len(header.requests) - 1:
        raise ValueError(_missing(header, last))
    return _packed(header, kept)


def _read(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


@contextmanager
def _written(path: Path) -> Iterator[IO[str]]:
    if path.suffix != ".gz":
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    # Neither a name nor a time goes into the archive.
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
        with io.TextIOWrapper(packed, encoding="utf-8") as file:
            yield file


def _parsed(
    path: Path, header: ReplayHeader, lines: Iterable[tuple[int, str]]
) -> Iterator[Position]:
    """Yield the checked positions."""
    last = (-1, 0)
    for number, line in lines:
        try:
            entry = json.loads(line)
            place = entry["r"], entry["p"]
            row = (*place, entry["parents"], entry["probs"], entry["path"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: no position: {error}") from None
        fault = _fault(header, last, row)
        if fault:
            raise ValueError(f"{path}, line {number}: {fault}")
        last = place
        yield row
    if last[0] != len(header.requests) - 1:
        raise ValueError(f"{path}: {_missing(header, last)}")


def _missing(header: ReplayHeader, last: tuple[int, int]) -> str:
    named = len(header.requests)
    return f"the header names {named} requests, the last recorded one is {last[0]}"


def _fault(
    header: ReplayHeader,
    last: tuple[int, int],
    row: Position,
) -> str:
    request, position, parents, probs, on_path = row
    if request >= len(header.requests):
        return f"r must be below {len(header.requests)}, got {request}"
    follows = request == last[0] + 1 or (request, position - 1) == last
    if not follows or position < 0:
        return f"r {request}, p {position} cannot follow r {last[0]}, p {last[1]}"
    if len(parents) != len(probs):
        return f"{len(parents)} parents for {len(probs)} probs"
    for node, (parent, prob) in enumerate(zip(parents, probs, strict=True)):
        if not -1 <= parent < node:
            return f"parent of node {node} must be an earlier node or -1, got {parent}"
        if not 0 <= prob <= 1:
            return f"prob of node {node} must be in [0, 1], got {prob}"
    for parent, node in zip([-1, *on_path], on_path, strict=False):
        if not 0 <= node < len(parents) or parents[node] != parent:
            return f"path must go from the root from child to child, got {on_path}"
    return ""


def _packed(header: ReplayHeader, kept: Sequence[Position]) -> Replay:
    """Pack positions into padded arrays."""
    requests = np.array([row[0] for row in kept], np.int64)
    starts = np.searchsorted(requests, np.arange(len(header.requests) + 1))
    shape = (len(kept), max((len(row[2]) for row in kept), default=0))
    parents = np.full(shape, -1, np.int64)
    probs = np.zeros(shape, np.float32)
    is_correct = np.zeros(shape, np.bool_)
    for index, (_request, _position, row_parents, row_probs, on_path) in enumerate(
        kept
    ):
        parents[index, : len(row_parents)] = row_parents
        probs[index, : len(row_probs)] = row_probs
        is_correct[index, on_path] = True
    return Replay(
        header=header,
        row_starts=starts.astype(np.int64),
        first_positions=np.array([kept[s][1] for s in starts[:-1]], np.int64),
        parents=parents,
        probs=probs,
        num_nodes=np.array([len(row[2]) for row in kept], np.int64),
        is_correct=is_correct,
    )
