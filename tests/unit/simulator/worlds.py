"""Recordings written out by hand, and a cost table whose sums are easy to check."""

from dataclasses import replace

from sglang_tetris.core.cost_table import CostTable
from sglang_tetris.core.replay import ReplayHeader, ReplayRequest, read_replay
from sglang_tetris.core.replay import write_replay as write
from sglang_tetris.simulator.forests import Recording


def recorded(tmp_path, *requests, topk: int = 2):
    """Return the recording of requests given as lists of (parents, probs, path)."""
    header = ReplayHeader(
        requests=tuple(
            ReplayRequest(kind="chat", sampling_class=0, prompt_tokens=10)
            for _ in requests
        ),
        max_chain=3,
        num_steps=2,
        topk=topk,
    )
    positions = (
        (number, position, *tree)
        for number, request in enumerate(requests)
        for position, tree in enumerate(request, start=1)
    )
    path = tmp_path / "hand.replay.jsonl"
    write(path, header, positions)
    return Recording.from_replay(read_replay(path))


def chain(*probs: float, correct: int) -> tuple[list[int], list[float], list[int]]:
    """Return a position whose first `correct` drafts agree with the text."""
    return list(range(-1, len(probs) - 1)), list(probs), list(range(correct))


def flat(ms: float, row_ms: float = 0.0) -> CostTable:
    """A part of so many milliseconds, and so many more per row."""
    rows = (1, 16384)
    times = tuple((ms + row_ms * n) / 1e3 for n in rows)
    return CostTable(token_knots=rows, knot_times_s=times)


# Milliseconds: verify 20 + rows, decode 10 + rows, a draft step 3, a reading 2.
TABLE = replace(
    flat(20, 1),
    phases={
        "decode": flat(10, 1),
        "draft_step": flat(3),
        "draft_extend": flat(2),
        "outside": flat(1),
        "prompt": flat(7),
    },
)
