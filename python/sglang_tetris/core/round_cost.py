"""What a round costs, put together from its parts, and kept up to date.

    undrafted   outside + decode(N) + sampling(N)
    drafted     (depth - 1) * step(R * topk)
                + outside + verify(N + B) + sampling(N + B)     per row verified
                + sampling(N + F) + extend(R + F)               per token emitted
    prompts     prompt(P) + extend(P)

N requests, R of them drafting; B drafts verified, F of them expected to be correct; P
tokens of prompts read between two rounds. Greedy sampling looks at every verified row,
the others at the tokens of the followed path. Every part has a `RecursiveFit`, and
costs nothing as long as it was not measured; decode and verify are two kinds of one,
since they are the same target over so many rows: what one teaches about a load holds
for the other.

Not decided here: what to do about the price (core.auto_policy).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from sglang_tetris.core.cost_table import CostTable
from sglang_tetris.core.recursive_fit import RecursiveFit

Reals = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64] | Reals
Sampling = Literal["greedy", "multinomial", "sorted"]
SAMPLINGS: tuple[Sampling, ...] = get_args(Sampling)

VERIFY = "verify"
_DECODE_KIND, _VERIFY_KIND = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a round is run on: requests, those that may draft, cached tokens."""

    batch_size: int
    num_drafting: int
    total_kv_tokens: int
    sampling: Sampling = "greedy"


class MeasuredPart(Protocol):
    """One measured part of a round; `phase` is "verify" or one of `PHASES`."""

    @property
    def phase(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def total_kv_tokens(self) -> int: ...
    @property
    def time_s(self) -> float: ...


class RoundCost:
    """The cost of rounds on one server, from a profile and from what was measured.

    profile  a table with phases, as `tools.profile_cost` writes it, or None
    """

    def __init__(self, profile: CostTable | None = None) -> None:
        phases = dict(profile.phases) if profile is not None else {}
        verify = replace(profile, phases={}) if profile is not None else None
        self._target = RecursiveFit((phases.get("decode"), verify))
        self._parts = {
            name: RecursiveFit((phases.get(name),))
            for name in (
                *("draft_step", "draft_extend", "outside", "prompt"),
                *(f"sample_{kind}" for kind in SAMPLINGS),
            )
        }
        self._num_target = [0, 0]
        self._has_profile = profile is not None

    def observe(
        self,
        phase: str,
        *,
        tokens: int,
        batch_size: int,
        total_kv_tokens: int,
        time_s: float,
    ) -> None:
        """Take in one measured part: "verify" or one of `cost_table.PHASES`."""
        size = {"tokens": tokens, "batch_size": batch_size}
        if phase in (VERIFY, "decode"):
            kind = _VERIFY_KIND if phase == VERIFY else _DECODE_KIND
            self._num_target[kind] += 1
            self._target.update(
                **size, total_kv_tokens=total_kv_tokens, time_s=time_s, kind=kind
            )
            return
        self._parts[phase].update(
            **size, total_kv_tokens=total_kv_tokens, time_s=time_s
        )

    def observe_all(self, parts: Iterable[MeasuredPart]) -> None:
        """Take in several measured parts."""
        for part in parts:
            self.observe(
                part.phase,
                tokens=part.tokens,
                batch_size=part.batch_size,
                total_kv_tokens=part.total_kv_tokens,
                time_s=part.time_s,
            )

    def num_measured(self, *, drafted: bool) -> int:
        """Return how many rounds of a kind were measured."""
        return self._num_target[_VERIFY_KIND if drafted else _DECODE_KIND]

    @property
    def has_profile(self) -> bool:
        return self._has_profile

    def undrafted_s(self, load: Load) -> float:
        """Return the seconds of a round in which the target decodes plainly."""
        rows = np.array([load.batch_size])
        time_s = self._part("outside", load, rows)
        time_s += self._target_s(_DECODE_KIND, load, rows)
        time_s += self._part(f"sample_{load.sampling}", load, rows)
        return float(time_s[0])

    def steps_s(
        self, load: Load, *, depth: int | Counts, topk: int, num_drafting: int
    ) -> Reals:
        """Return the seconds of growing trees of one or many depths, each >= 1."""
        step_s = self._part("draft_step", load, np.array([num_drafting * topk]))
        return (depth - 1) * step_s

    def verify_s(self, load: Load, num_drafts: Counts) -> Reals:
        """Return the seconds of verifying so many drafts, whatever comes of them."""
        rows = load.batch_size + num_drafts
        time_s = self._target_s(_VERIFY_KIND, load, rows)
        time_s += self._part("outside", load, np.array([load.batch_size]))
        if load.sampling == "greedy":
            time_s += self._part("sample_greedy", load, rows)
        return time_s

    def emitted_s(self, load: Load, emitted: Counts) -> Reals:
        """Return the seconds that emitting so many tokens takes, all requests together.

        Choosing them, and the draft's reading them for the round after.
        """
        share = load.num_drafting / load.batch_size
        time_s = self.read_s(load, emitted.astype(np.float64) * share)
        if load.sampling != "greedy":
            time_s += self._part(f"sample_{load.sampling}", load, emitted)
        return time_s

    def read_s(self, load: Load, tokens: Counts) -> Reals:
        """Return the seconds that the draft takes to read so many tokens."""
        return self._part("draft_extend", load, tokens)

    def prompt_s(self, tokens: Counts, *, is_read: bool) -> Reals:
        """Return the seconds of prompts of so many tokens; is_read: by the draft."""
        alone = Load(batch_size=1, num_drafting=1, total_kv_tokens=0)
        time_s = self._part("prompt", alone, tokens)
        if is_read:
            time_s += self.read_s(alone, tokens)
        return time_s

    def table(self) -> CostTable:
        """Return what is known as one table; RuntimeError before any sample."""
        phases = {"decode": self._target.table(_DECODE_KIND)}
        for name, fit in self._parts.items():
            if fit.is_known:
                phases[name] = fit.table()
        return replace(self._target.table(_VERIFY_KIND), phases=phases)

    def _target_s(self, kind: int, load: Load, rows: Counts) -> Reals:
        return self._target.times_s(
            tokens=rows,
            batch_size=load.batch_size,
            total_kv_tokens=load.total_kv_tokens,
            kind=kind,
        )

    def _part(self, name: str, load: Load, rows: Counts) -> Reals:
        fit = self._parts[name]
        if not fit.is_known:
            return np.zeros(np.shape(rows))
        return fit.times_s(
            tokens=rows,
            batch_size=load.batch_size,
            total_kv_tokens=load.total_kv_tokens,
        )
