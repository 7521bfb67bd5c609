"""`--tetris-trace PATH`: what was drafted, verified and accepted, as JSON lines.

The first line is a header; then one line per round:

    round, time_s, batch_size, total_kv_tokens, depth, reason, draft_budget
    laps       measured parts since the last line: phase, tokens, batch_size,
               total_kv_tokens, seconds
    requests   for each request with drafts: rid, prompt_tokens, position (tokens
               emitted before the round), sampling_class, parents and probs of its tree
               as the draft gave them, kept (verified nodes), path (correct ones, from
               the root down)

Token ids, which are the users' text, are written only if `trace_tokens` asks for them:
tokens of the nodes, and emitted. A trace never stops the server: if it cannot be
written (a full disk), that is said once, and the rest is left out.
"""

import contextlib
import json
import logging
import time
from pathlib import Path
from typing import Any, TextIO

from sglang_tetris.adapter import options
from sglang_tetris.adapter.round_clock import Lap
from sglang_tetris.adapter.round_record import RoundRecord
from sglang_tetris.core.config import TetrisConfig
from sglang_tetris.core.errors import TetrisConfigError
from sglang_tetris.core.replay import TRACE_FORMAT

logger = logging.getLogger(__name__)


def check_writable(path: str) -> None:
    """Make the file, empty; TetrisConfigError in one sentence if that is impossible."""
    try:
        Path(path).open("w", encoding="utf-8").close()
    except OSError as error:
        raise TetrisConfigError(
            f"--tetris-trace must be a file that can be written: {error}"
        ) from error


def open_trace(config: TetrisConfig, num_steps: int, topk: int) -> "TraceWriter | None":
    """Return the trace that the configuration asks for, or None."""
    if config.trace is None:
        return None
    header = {"draft": options.current().draft_kind}
    header |= {"num_steps": num_steps, "topk": topk}
    return TraceWriter(config.trace, header, tokens=config.trace_tokens)


class TraceWriter:
    """Writes rounds to a file; what it held before is gone."""

    def __init__(self, path: str, header: dict[str, Any], *, tokens: bool) -> None:
        self._tokens = tokens
        self._begin = time.monotonic()
        self._num_rounds = 0
        # Open as long as the server runs.
        self._file: TextIO | None = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
        self._write({"format": TRACE_FORMAT, **header})

    def record_round_host(self, done: RoundRecord, laps: list[Lap]) -> None:
        """Write one round; waits for an accelerator."""
        self._num_rounds += 1
        if self._file is None:
            return
        line = {
            "round": self._num_rounds,
            "time_s": round(time.monotonic() - self._begin, 6),
            "batch_size": done.view.load.batch_size,
            "total_kv_tokens": done.view.load.total_kv_tokens,
            "depth": done.decided.depth,
            "reason": done.decided.reason,
            "draft_budget": done.draft_budget,
            "laps": [[*lap[:-1], round(lap.time_s, 7)] for lap in laps],
            "requests": self._requests(done),
        }
        self._write(line)

    def _requests(self, done: RoundRecord) -> list[dict[str, Any]]:
        trees = done.drafted
        parents, probs = trees.parents.tolist(), trees.accept_probs.tolist()
        tokens, counts = trees.tokens.tolist(), trees.num_nodes.tolist()
        keep, node_ids = done.allocation.keep.tolist(), done.plan.node_ids.tolist()
        rows = done.accepted.accept_index.tolist()
        emitted = done.accepted.accept_tokens.tolist()
        entries = []
        for place, req in enumerate(done.reqs):
            count = counts[place]
            if not count:
                continue
            entry = {
                "rid": req.rid,
                "prompt_tokens": len(req.origin_input_ids),
                "position": len(req.output_ids),
                "sampling_class": done.view.settings[place].sampling_class,
                "parents": parents[place][:count],
                "probs": [float(f"{prob:.4g}") for prob in probs[place][:count]],
                "kept": [node for node in range(count) if keep[place][node]],
                "path": [node_ids[row] for row in rows[place][1:] if row >= 0],
            }
            if self._tokens:
                entry["tokens"] = tokens[place][:count]
                entry["emitted"] = [token for token in emitted[place] if token >= 0]
            entries.append(entry)
        return entries

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            logger.error("TETRIS: the trace ends here, it cannot be written: %s", error)
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        # Closing writes what is left, to the same full disk.
        with contextlib.suppress(OSError):
            file.close()
