"""What a round costs, put together from its parts, and kept up to date.

    undrafted   outside + decode(N) + sampling(N)
    drafted     outside + extend(N + F) + (depth - 1) * step(R * topk)
                + verify(N + B) + sampling(N + B or N + F)

N requests, R of them drafting; B drafts verified, F of them expected to be correct.
Greedy sampling looks at every verified row, the others at those on the followed path.
Every part has a `RecursiveFit`; decode and verify are two kinds of one, since they are
the same target over so many rows: what one teaches about a load holds for the other.

Not decided here: what to do about the price (core.auto_policy).
"""

from dataclasses import replace
from typing import Literal, get_args

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
                *("draft_step", "draft_extend", "outside"),
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

    def num_measured(self, *, drafted: bool) -> int:
        """Return how many rounds of a kind were measured."""
        return self._num_target[_VERIFY_KIND if drafted else _DECODE_KIND]

    @property
    def has_profile(self) -> bool:
        return self._has_profile

    def undrafted_s(
        self, *, batch_size: int, total_kv_tokens: int, sampling: Sampling
    ) -> float:
        """Return the seconds of a round in which the target decodes plainly."""
        rows = np.array([batch_size])
        time_s = self._part("outside", rows, batch_size, total_kv_tokens)
        time_s += self._target_s(_DECODE_KIND, rows, batch_size, total_kv_tokens)
        time_s += self._part(f"sample_{sampling}", rows, batch_size, total_kv_tokens)
        return float(time_s[0])

    def draft_s(
        self,
        *,
        depth: int,
        topk: int,
        num_drafting: int,
        emitted: Counts,
        total_kv_tokens: int,
    ) -> Reals:
        """Return the seconds of drafting: the extension over `emitted` tokens, steps.

        For many numbers of tokens at once.
        """
        size = (num_drafting, total_kv_tokens)
        time_s = self._part("draft_extend", emitted, *size)
        if depth > 1:
            rows = np.array([num_drafting * topk])
            time_s = time_s + (depth - 1) * self._part("draft_step", rows, *size)
        return time_s

    def after_draft_s(
        self,
        *,
        num_drafts: Counts,
        num_correct: Counts,
        batch_size: int,
        total_kv_tokens: int,
        sampling: Sampling,
    ) -> Reals:
        """Return the seconds of verifying so many drafts, for many numbers at once."""
        rows = batch_size + num_drafts
        sampled = rows if sampling == "greedy" else batch_size + num_correct
        size = (batch_size, total_kv_tokens)
        time_s = self._target_s(_VERIFY_KIND, rows, *size)
        time_s = time_s + self._part(f"sample_{sampling}", sampled, *size)
        return time_s + self._part("outside", np.array([batch_size]), *size)

    def table(self) -> CostTable:
        """Return what is known as one table; RuntimeError before any sample."""
        phases = {"decode": self._target.table(_DECODE_KIND)}
        for name, fit in self._parts.items():
            if fit.is_known:
                phases[name] = fit.table()
        return replace(self._target.table(_VERIFY_KIND), phases=phases)

    def _target_s(self, kind: int, rows: Counts, bs: int, kv: int) -> Reals:
        return self._target.table(kind).step_times_s(
            total_verify_tokens=rows, batch_size=bs, total_kv_tokens=kv
        )

    def _part(self, name: str, rows: Counts, bs: int, kv: int) -> Reals:
        fit = self._parts[name]
        if not fit.is_known:
            return np.zeros(len(rows))
        return fit.table().step_times_s(
            total_verify_tokens=rows, batch_size=bs, total_kv_tokens=kv
        )
