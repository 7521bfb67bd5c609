"""How the next round is run: whether to draft, how deep, and how much to verify.

A budget is given as N (per step, whole batch), kx (k per running request) or auto, and
can be replaced while the server runs. N and kx draft to the server's full depth, unless
they are 0. auto asks core.auto_policy, which learns here what rounds cost and what
drafts are worth.

Decided on rank 0 (rank_agreement.py); the other ranks only learn the outcome.
"""

import logging
from typing import Any

import numpy as np
import torch

from sglang_tetris.adapter import reserve
from sglang_tetris.adapter.rank_agreement import RankAgreement
from sglang_tetris.adapter.round_clock import Lap
from sglang_tetris.adapter.round_record import RoundRecord
from sglang_tetris.core import CostTable, DraftTrees
from sglang_tetris.core.auto_policy import AutoPolicy, Load, RoundPlan
from sglang_tetris.core.config import BudgetSpec
from sglang_tetris.core.round_cost import RoundCost
from sglang_tetris.core.survival import node_depths_torch
from sglang_tetris.kernels import path_survival

logger = logging.getLogger(__name__)


class RoundPlanner:
    """The budget of a running server; `str()` is what the user wrote: auto, 16, 3x.

    plan           how the next round is to be run
    draft_always   draft in every round, also where nothing is verified
    lagged         the budget may not look at the round's own drafts
    always_reads   the draft must read prompts also while nothing is drafted
    """

    def __init__(
        self,
        spec: BudgetSpec,
        *,
        num_steps: int,
        topk: int,
        agreement: RankAgreement,
        cost_table: CostTable | None = None,
        draft_always: bool = False,
        lagged: bool = False,
        always_reads: bool = True,
    ) -> None:
        self.cost = RoundCost(cost_table)
        self.policy = AutoPolicy(
            self.cost, max_depth=num_steps, topk=topk, always_reads=always_reads
        )
        self._always_reads = always_reads
        self._num_steps = num_steps
        self._agreement = agreement
        self._draft_always, self._lagged = draft_always, lagged
        # Of the two log lines about what is not known yet.
        self._num_announced = 0 if cost_table is None else 2
        self.use(spec)

    def __str__(self) -> str:
        return str(self._spec)

    @property
    def is_auto(self) -> bool:
        return self._spec.mode == "auto"

    def use(self, spec: BudgetSpec) -> None:
        """Replace the budget from the next round on.

        auto decides at the end of a round, so the first one under it is plain.
        """
        self._spec = spec
        self._fixed = spec.policy()
        self._set(self._fixed_plan() if self._fixed else RoundPlan(depth=0))

    def next_round(self, load: Load) -> None:
        """Decide how the next round is run, from what is known by now."""
        if self._fixed is not None:
            return
        plan = self.policy.plan_round(load) if self._agreement.decides else None
        self._set(self._agreement.plan(plan))
        self._announce()

    def draft_budget(
        self, trees: DraftTrees, load: Load, available: torch.Tensor, weights: Any
    ) -> int:
        """Return the draft tokens that this step may verify, the whole batch.

        available  [bs, max_nodes] bool, drafts that are there under the caps
        """
        if self._fixed is not None:
            return self._fixed.draft_budget(
                survival=trees.accept_probs,
                num_nodes=trees.num_nodes,
                total_kv_tokens=load.total_kv_tokens,
            )
        if self._lagged:
            return self.plan.draft_budget
        budget = None
        if self._agreement.decides:
            values = path_survival(trees)
            if weights is not None:
                values = values * weights[:, None]
            best_first = np.sort(values[available].cpu().numpy())[::-1]
            budget = self.policy.draft_budget(
                self.plan, load, best_first.astype(np.float64)
            )
        return self._agreement.number(budget)

    def observe(self, done: RoundRecord, laps: list[Lap]) -> None:
        """Learn from a round: what its parts took, what its drafts were worth."""
        if self._fixed is not None or not self._agreement.decides:
            return
        self.cost.observe_all(laps)
        for lap in laps:
            if lap.phase == "prompt":
                self.policy.observe_prompts(lap.tokens)
        if done.rows and done.trees.max_nodes:
            trees, expected = done.trees, done.allocation.expected_correct_drafts
            depths = torch.where(trees.is_node(), node_depths_torch(trees), 0)
            self.policy.observe_drafts(
                done.decided,
                path_survival(trees)[done.rows].cpu().numpy(),
                depths[done.rows].cpu().numpy(),
                num_expected=float(expected.sum()),
                num_correct=done.num_correct_drafts,
            )

    def describe(self) -> dict[str, Any]:
        """Return the reasons of the last decision, for /server_info."""
        described: dict[str, Any] = {
            "depth": self.plan.depth,
            "reason": self.plan.reason if self.is_auto else "fixed",
        }
        if self.is_auto:
            described |= self.policy.describe()
            described["tokens_per_s"] = [round(rate, 2) for rate in self.plan.rates]
        return described

    def why(self) -> str:
        """Return the last decision and its reason in a few words, for the log."""
        if not self.is_auto:
            return f"depth {self.plan.depth}"
        expected = ", ".join(f"{rate:.4g}" for rate in self.plan.rates)
        return (
            f"depth {self.policy.depth} ({self.plan.reason}), tokens/s expected by "
            f"depth: [{expected}]"
        )

    def _fixed_plan(self) -> RoundPlan:
        drafts = self._draft_always or self._spec.value > 0
        return RoundPlan(
            depth=self._num_steps if drafts else 0,
            reads_prompts=drafts or self._always_reads,
        )

    def _set(self, plan: RoundPlan) -> None:
        self.plan = plan
        reserve.next_round_is_plain(plan.depth == 0)

    def _announce(self) -> None:
        """Say once that costs are being measured, and once that they are known."""
        if self._num_announced == 2:
            return
        if not self.policy.is_exploring:
            logger.info("TETRIS: what a round costs is known now, %s.", self.why())
            self._num_announced = 2
        elif self._num_announced == 0 and self.policy.num_explored:
            logger.info(
                "TETRIS: no cost table was given (--tetris-cost-table): the first "
                "rounds draft and decode plainly in turn, to measure what each costs."
            )
            self._num_announced = 1
