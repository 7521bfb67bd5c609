"""The budget of a running server, and how many drafts each request may have.

A budget is given as N (per step, whole batch), kx (k per running request) or auto. It
can be replaced while the server runs; the change takes effect with the next round.
"""

from typing import Any

from sglang_tetris.core import DraftBudget, DraftTrees
from sglang_tetris.core.config import (
    BudgetSpec,
    TetrisConfig,
    parse_request_max_drafts,
)
from sglang_tetris.kernels import path_survival

# What auto stands for until budgets follow the measured cost of a token.
AUTO_BUDGET = BudgetSpec("mean", 1)


class BudgetHolder:
    """The current budget policy; `str()` is what the user wrote: auto, 16, 3x."""

    def __init__(self, spec: BudgetSpec) -> None:
        self.use(spec)

    def __str__(self) -> str:
        return str(self._spec)

    def draft_budget(self, trees: DraftTrees) -> int:
        """Return the draft tokens that this step may verify, the whole batch."""
        return self._policy.draft_budget(
            survival=path_survival(trees), num_nodes=trees.num_nodes, total_kv_tokens=0
        )

    def is_zero(self) -> bool:
        """Whether nothing can be verified whatever is drafted, known beforehand."""
        return self._spec.mode != "auto" and self._spec.value == 0

    def use(self, spec: BudgetSpec) -> None:
        """Replace the budget from the next round on."""
        policy = (AUTO_BUDGET if spec.mode == "auto" else spec).policy()
        assert policy is not None  # only auto has none
        self._spec, self._policy = spec, policy
        self._policy: DraftBudget


def own_limit(req: Any, config: TetrisConfig) -> int | None:
    """Return the limit on a request's drafts per round that users set, or None."""
    own = parse_request_max_drafts(req.sampling_params.custom_params)
    return config.request_max_drafts(own)


def draft_caps_host(reqs: list[Any], limits: list[int | None], most: int) -> list[int]:
    """Return how many drafts each request can use this round, at most `most`.

    A request that may emit m more tokens can use m - 1 drafts: the bonus token is one
    of them. What one request cannot use goes to the others.
    """
    caps = []
    for req, limit in zip(reqs, limits, strict=True):
        left = req.sampling_params.max_new_tokens
        cap = most if left is None else min(most, left - len(req.output_ids) - 1)
        caps.append(max(0, cap if limit is None else min(cap, limit)))
    return caps
