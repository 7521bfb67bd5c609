"""Decisions that depend on a clock are rank 0's; the other ranks are told."""

from typing import Any, get_args

import torch
import torch.distributed

from sglang_tetris.core.round_plan import Reason, RoundPlan

_REASONS = get_args(Reason)


class RankAgreement:
    """Sends rank 0's numbers to the other ranks of a tensor-parallel group.

    group is SGLang's coordinator of the ranks that share the requests.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._alone = group.world_size == 1

    @property
    def decides(self) -> bool:
        """Whether this rank is the one that decides."""
        return self._alone or self._group.rank_in_group == 0

    def number(self, value: int | None) -> int:
        """Return rank 0's number; the others pass None."""
        return self._numbers([value or 0])[0]

    def reals(self, values: list[float]) -> list[float]:
        """Return rank 0's values; every rank passes as many."""
        if self._alone:
            return values
        return self._broadcast(torch.tensor(values, dtype=torch.float64)).tolist()

    def text(self, value: str) -> str:
        """Return rank 0's text; what the others pass is not looked at."""
        if self._alone:
            return value
        sent = [value]
        torch.distributed.broadcast_object_list(
            sent, src=self._group.first_rank, group=self._group.cpu_group
        )
        return sent[0]

    def plan(self, plan: RoundPlan | None) -> RoundPlan:
        """Return rank 0's plan; the others pass None. They get no rates."""
        if self._alone:
            assert plan is not None
            return plan
        numbers = [0] * 6
        if plan is not None:
            drafting = -1 if plan.num_drafting is None else plan.num_drafting
            numbers = [plan.depth, drafting, plan.draft_budget, plan.least_budget]
            numbers += [_REASONS.index(plan.reason), int(plan.reads_prompts)]
        depth, drafting, budget, least, reason, reads = self._numbers(numbers)
        if plan is not None:
            return plan
        return RoundPlan(
            depth=depth,
            num_drafting=None if drafting < 0 else drafting,
            draft_budget=budget,
            least_budget=least,
            reason=_REASONS[reason],
            reads_prompts=bool(reads),
        )

    def _numbers(self, values: list[int]) -> list[int]:
        if self._alone:
            return values
        return self._broadcast(torch.tensor(values, dtype=torch.int64)).tolist()

    def _broadcast(self, sent: torch.Tensor) -> torch.Tensor:
        torch.distributed.broadcast(
            sent, src=self._group.first_rank, group=self._group.cpu_group
        )
        return sent
