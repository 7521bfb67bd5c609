"""What one round did, for those who learn from it or report it."""

from dataclasses import dataclass
from typing import Any

from sglang_tetris.adapter.round_view import RoundView
from sglang_tetris.core import AcceptResult, Allocation, DraftTrees, VerifyPlan
from sglang_tetris.core.round_plan import RoundPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One finished round; lists and rows are those of its batch.

    decided      how it was planned to run
    rows         places of the requests that drafted
    drafted      their trees with the draft's own probabilities, trees with calibrated
    accept_lens  tokens that each request emitted
    cut_short    requests whose walk ended before its row's children were compared
    """

    reqs: list[Any]
    view: RoundView
    decided: RoundPlan
    rows: list[int]
    drafted: DraftTrees
    trees: DraftTrees
    draft_budget: int
    allocation: Allocation
    plan: VerifyPlan
    accepted: AcceptResult
    accept_lens: list[int]
    cut_short: list[int]

    @property
    def num_correct_drafts(self) -> int:
        return sum(self.accept_lens) - len(self.accept_lens)
