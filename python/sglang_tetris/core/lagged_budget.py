"""A budget from the step before, for verification that corrects for the draft's law.

    budget(step t) = policy(survival(step t - 1), total_kv_tokens(step t))

A policy that looks at this step's survival knows something of the tokens just drawn:
survival at position 2 depends on the token at position 1. `match` does not mind.
`rejection` does wherever the cost has steps: the drawn tokens then decide how many of
them are verified, beyond what the order of the positions allows, and the output is no
longer the target's. What the step before has shown is part of the past and free to use.

Not decided here: the policy itself (core.budget).
"""

import torch

from sglang_tetris.core.budget import DraftBudget
from sglang_tetris.core.errors import check_count


class LaggedBudget:
    """Another policy, asked about the requests of the step before.

    The step before may have had another number of requests. Its rows are then repeated
    or left out evenly: of n rows, today's row r of bs stands for row floor(r * n / bs).
    So the policy prices today's batch size and today's KV tokens, with survivals that
    are as varied as those it saw. Rows are not matched to requests.

    Until a step with requests has been seen the budget is `first_drafts_per_request`
    for each request; a step without requests leaves what is remembered as it is. The
    survivals are copied, so the caller may overwrite them.
    """

    __slots__ = ("_last", "first_drafts_per_request", "policy")

    def __init__(
        self, policy: DraftBudget, *, first_drafts_per_request: int = 1
    ) -> None:
        self.policy = policy
        self.first_drafts_per_request = check_count(
            "first_drafts_per_request", first_drafts_per_request
        )
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def draft_budget(
        self,
        *,
        survival: torch.Tensor,
        num_nodes: torch.Tensor,
        total_kv_tokens: int,
    ) -> int:
        """Return the budget from the last call's values, then remember this call's.

        See `DraftBudget`. To be called once per step; of `survival` and `num_nodes`
        only the batch size bears on the result.
        """
        batch_size = num_nodes.shape[0]
        budget = self._budget(batch_size, total_kv_tokens)
        if batch_size > 0:
            self._last = survival.detach().clone(), num_nodes.clone()
        return budget

    def _budget(self, batch_size: int, total_kv_tokens: int) -> int:
        if self._last is None:
            return self.first_drafts_per_request * batch_size
        survival, num_nodes = self._last
        row = torch.arange(batch_size, device=survival.device)
        if batch_size > 0:
            row = row * survival.shape[0] // batch_size
        return self.policy.draft_budget(
            survival=survival[row],
            num_nodes=num_nodes[row],
            total_kv_tokens=total_kv_tokens,
        )

    def __repr__(self) -> str:
        return (
            f"LaggedBudget({self.policy!r}, "
            f"first_drafts_per_request={self.first_drafts_per_request})"
        )
