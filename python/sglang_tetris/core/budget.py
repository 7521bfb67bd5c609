"""How many drafts a step verifies, all requests together.

    fixed       B
    mean        drafts_per_request * N                    (the paper's capacity)
    throughput  the B with the largest (N + F(B)) / T(N + B)

N requests give N bonus tokens each step whatever is verified; F(B) is the sum of the B
best survivals of the batch, so concave; T is the measured time of a step. T has steps
(captured graphs, tiles): the ratio may fall and rise again, so every B is looked at.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from sglang_tetris.core.cost_table import CostTable
from sglang_tetris.core.errors import check_count


class StepCost(Protocol):
    """What a throughput budget needs to know: seconds per step."""

    def step_time_s(
        self, *, total_verify_tokens: int, batch_size: int, total_kv_tokens: int
    ) -> float: ...


class DraftBudget(Protocol):
    """A policy. The result counts drafts, not anchors, and may exceed what there is."""

    def draft_budget(
        self,
        *,
        survival: torch.Tensor,
        num_nodes: torch.Tensor,
        total_kv_tokens: int,
    ) -> int:
        """Return the budget of a step.

        survival `[bs, max_nodes]` float32 as of `path_survival`, num_nodes `[bs]`
        int64, total_kv_tokens the prefix lengths' sum.
        """
        ...


class FixedBudget:
    """The same number of drafts in every step."""

    __slots__ = ("num_drafts",)

    def __init__(self, draft_budget: int) -> None:
        self.num_drafts = check_count("draft_budget", draft_budget)

    def draft_budget(
        self,
        *,
        survival: torch.Tensor,
        num_nodes: torch.Tensor,
        total_kv_tokens: int,
    ) -> int:
        return self.num_drafts

    def __repr__(self) -> str:
        return f"FixedBudget({self.num_drafts})"


class MeanBudget:
    """So many drafts per request on average, free to move between requests."""

    __slots__ = ("drafts_per_request",)

    def __init__(self, drafts_per_request: int) -> None:
        self.drafts_per_request = check_count("drafts_per_request", drafts_per_request)

    def draft_budget(
        self,
        *,
        survival: torch.Tensor,
        num_nodes: torch.Tensor,
        total_kv_tokens: int,
    ) -> int:
        return self.drafts_per_request * num_nodes.shape[0]

    def __repr__(self) -> str:
        return f"MeanBudget({self.drafts_per_request})"


class ThroughputBudget:
    """The number of drafts that gives the most tokens per second.

    Of equally good ones the smallest. An int has to reach the host, so this waits for
    an accelerator. In a `LaggedBudget` it looks at the step before, which is there by
    then, and which rejection verification requires.
    """

    __slots__ = ("cost_table",)

    def __init__(self, cost_table: StepCost) -> None:
        self.cost_table = cost_table

    def draft_budget(
        self,
        *,
        survival: torch.Tensor,
        num_nodes: torch.Tensor,
        total_kv_tokens: int,
    ) -> int:
        """See `DraftBudget`; raises ValueError if the table gives no positive time."""
        batch_size = num_nodes.shape[0]
        if batch_size == 0:
            return 0
        best_first = _survivals_host(survival, num_nodes)
        tokens = batch_size + np.concatenate([[0.0], best_first.cumsum()])
        sizes = batch_size + np.arange(len(tokens))
        times = self._times_s(sizes, batch_size, total_kv_tokens)
        if not (times > 0).all():
            raise ValueError(
                f"cost_table must give positive times, got {times.min()} s"
            )
        return int((tokens / times).argmax())

    def _times_s(
        self, sizes: npt.NDArray[np.int64], batch_size: int, total_kv_tokens: int
    ) -> npt.NDArray[np.float64]:
        if isinstance(self.cost_table, CostTable):
            return self.cost_table.step_times_s(
                total_verify_tokens=sizes,
                batch_size=batch_size,
                total_kv_tokens=total_kv_tokens,
            )
        times = [
            self.cost_table.step_time_s(
                total_verify_tokens=size,
                batch_size=batch_size,
                total_kv_tokens=total_kv_tokens,
            )
            for size in sizes.tolist()
        ]
        return np.array(times, np.float64)

    def __repr__(self) -> str:
        return f"ThroughputBudget({self.cost_table!r})"


def _survivals_host(
    survival: torch.Tensor, num_nodes: torch.Tensor
) -> npt.NDArray[np.float64]:
    """Survivals of the real nodes, best first."""
    values = survival.detach().cpu().to(torch.float64).numpy()
    counts = num_nodes.cpu().numpy()
    real = values[np.arange(values.shape[1]) < counts[:, None]]
    return np.sort(real)[::-1]
