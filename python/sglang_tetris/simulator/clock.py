"""What the parts of a simulated round cost, straight from a cost table.

    undrafted   outside(N) + decode(N) + sampling(N)
    drafted     outside(N) + extend(E) + (depth - 1) * step(R * topk)
                + verify(N + B) + sampling(N + B, or N + F)
    prompts     prompt(rows), and draft_extend(rows) where the draft reads along

N requests, R of them drafting; E tokens that the draft has not seen; B drafts verified,
F of them correct. Greedy sampling looks at every verified row, the others at those on
the followed path. A phase that the table lacks is left out; without `decode`, plain
decoding costs a verify of N rows, and so do prompts without `prompt`. Steps are
reported with the whole batch's requests, as a worker does.

These are the true costs. What a policy is told of them, see `noisy`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sglang_tetris.core.cost_table import CostTable
from sglang_tetris.core.round_cost import VERIFY, Load

Reals = npt.NDArray[np.float64]

_NOISE = 0.03  # standard deviation of log time
_OUTLIERS = 0.01  # share of steps that waited for something else
_SLOWER = (1.5, 4.0)  # and by which factor they then take longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One step of a round: what `RoundCost.observe` wants to know of it, `count` times.

    Times are seconds of one of the `count` alike steps.
    """

    phase: str
    tokens: int
    batch_size: int
    total_kv_tokens: int
    time_s: float
    count: int = 1


class Clock:
    """Times of one server's parts; tables are laid out as arrays once, for speed."""

    def __init__(self, table: CostTable) -> None:
        tables = {VERIFY: replace(table, phases={}), **table.phases}
        for name in ("decode", "prompt"):
            tables.setdefault(name, tables[VERIFY])
        self._times = {name: _time_of(part) for name, part in tables.items()}

    def parts(self, load: Load, *steps: tuple[str, int, int]) -> list[Part]:
        """Return steps with their times, each given as (phase, rows, how often)."""
        size = load.batch_size, load.total_kv_tokens
        return [
            Part(
                phase=phase,
                tokens=rows,
                batch_size=size[0],
                total_kv_tokens=size[1],
                time_s=self._times[phase](rows, *size),
                count=count,
            )
            for phase, rows, count in steps
            if rows and count and phase in self._times
        ]

    def undrafted(self, load: Load) -> list[Part]:
        """Return the parts of a round in which the target decodes plainly."""
        rows = load.batch_size
        steps = [(name, rows, 1) for name in ("outside", "decode")]
        return self.parts(load, *steps, (f"sample_{load.sampling}", rows, 1))

    def drafted(
        self,
        load: Load,
        *,
        depth: int,
        topk: int,
        num_drafting: int,
        extended: int,
        num_drafts: int,
        num_correct: int,
    ) -> list[Part]:
        """Return the parts of a drafted round; see the module for the letters."""
        rows = load.batch_size + num_drafts
        on_path = load.batch_size + num_correct
        return self.parts(
            load,
            ("outside", load.batch_size, 1),
            ("draft_extend", extended, 1),
            ("draft_step", num_drafting * topk, depth - 1),
            (VERIFY, rows, 1),
            (
                f"sample_{load.sampling}",
                rows if load.sampling == "greedy" else on_path,
                1,
            ),
        )


def total_s(parts: Iterable[Part]) -> float:
    """Return the seconds of all parts together."""
    return sum(part.time_s * part.count for part in parts)


def noisy(parts: Iterable[Part], rng: np.random.Generator) -> list[Part]:
    """Return the parts as a server would measure them: a little off, some far off."""
    measured = []
    for part in parts:
        factor = float(np.exp(rng.normal(0.0, _NOISE)))
        if rng.random() < _OUTLIERS:
            factor *= float(rng.uniform(*_SLOWER))
        measured.append(replace(part, time_s=part.time_s * factor))
    return measured


def _time_of(table: CostTable) -> Callable[[int, int, int], float]:
    curve = _curve(table, 4096)

    def time_s(tokens: int, batch_size: int, kv: int) -> float:
        nonlocal curve
        if tokens >= len(curve):
            curve = _curve(table, 2 * tokens)
        return (
            float(curve[tokens])
            + table.per_request_s * batch_size
            + table.per_kv_token_s * kv
        )

    return time_s


def _curve(table: CostTable, length: int) -> Reals:
    return table.step_times_s(
        total_verify_tokens=np.arange(length), batch_size=0, total_kv_tokens=0
    )
