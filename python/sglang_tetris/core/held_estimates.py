"""What rounds are expected to yield and cost, held while the load is alike.

Both change slowly and take a millisecond to work out, so what was computed for a load
is used for some rounds.

Not decided here: what to do about it (core.auto_policy).
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from sglang_tetris.core.depth_rates import DepthRates, depth_rates
from sglang_tetris.core.prompt_steps import PromptSteps
from sglang_tetris.core.round_cost import Load, RoundCost
from sglang_tetris.core.survival_profile import SurvivalProfile

Reals = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_HELD_ROUNDS = 8
# Shares by which a load may differ and still be alike.
_ALIKE_SIZE, _ALIKE_KV = 0.05, 0.25
_ALL_BUDGETS_BELOW = 512


class HeldEstimates:
    """Rates of every depth, and times of verifying; arguments as of `depth_rates`."""

    def __init__(
        self,
        cost: RoundCost,
        profile: SurvivalProfile,
        prompts: PromptSteps,
        *,
        topk: int,
        always_reads: bool,
    ) -> None:
        self._cost, self._profile, self._prompts = cost, profile, prompts
        self._topk, self._always_reads = topk, always_reads
        self._rates: tuple[Load, int, DepthRates] | None = None
        self._grid: tuple[Load, int, Ints, Reals] | None = None

    def fresh_rates(self, load: Load) -> DepthRates:
        """Return what each depth is expected to yield, worked out now."""
        return depth_rates(
            load,
            cost=self._cost,
            profile=self._profile,
            prompts=self._prompts,
            topk=self._topk,
            always_reads=self._always_reads,
        )

    def rates(self, load: Load) -> DepthRates:
        """Return what each depth is expected to yield; at most some rounds old."""
        if self._rates is not None:
            seen, age, rates = self._rates
            if age < _HELD_ROUNDS and _are_alike(seen, load):
                self._rates = (seen, age + 1, rates)
                return rates
        self._rates = (load, 1, self.fresh_rates(load))
        return self._rates[2]

    def verify_grid(self, load: Load, most: int) -> tuple[Ints, Reals]:
        """Return budgets up to at least `most`, and the seconds of verifying them."""
        if self._grid is not None:
            seen, age, drafts, time_s = self._grid
            # How much text is cached adds the same to all of them.
            same = replace(load, total_kv_tokens=seen.total_kv_tokens) == seen
            if same and age < _HELD_ROUNDS and drafts[-1] >= most:
                self._grid = (seen, age + 1, drafts, time_s)
                return drafts, time_s
        drafts = _budgets(max(2 * most, 1))
        time_s = self._cost.verify_s(load, drafts)
        self._grid = (load, 1, drafts, time_s)
        return drafts, time_s


def _are_alike(seen: Load, load: Load) -> bool:
    return (
        seen.sampling == load.sampling
        and abs(seen.batch_size - load.batch_size) <= _ALIKE_SIZE * load.batch_size
        and abs(seen.num_drafting - load.num_drafting) <= _ALIKE_SIZE * load.batch_size
        and abs(seen.total_kv_tokens - load.total_kv_tokens)
        <= _ALIKE_KV * load.total_kv_tokens
    )


def _budgets(most: int) -> Ints:
    """All budgets up to a bound, then ever coarser ones, `most` included."""
    if most < _ALL_BUDGETS_BELOW:
        return np.arange(most + 1)
    coarse = np.geomspace(_ALL_BUDGETS_BELOW, most, _ALL_BUDGETS_BELOW)
    return np.unique(
        np.concatenate([np.arange(_ALL_BUDGETS_BELOW), coarse.astype(np.int64), [most]])
    )
