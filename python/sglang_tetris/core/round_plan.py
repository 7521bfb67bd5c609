"""What is decided before a round: whether to draft, how deep, and for whom.

Not decided here: any of it (core.auto_policy).
"""

from dataclasses import dataclass
from typing import Literal

Reason = Literal["exploring", "rate", "probe", "check"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """How the next round is to be run.

    depth          levels to draft, 0 = none: the target decodes plainly
    num_drafting   at most so many requests draft; None = all that may
    draft_budget   drafts to verify, judged by earlier rounds
    least_budget   drafts to verify at least, whatever they are worth
    reason         exploring, rate (the best is known), probe or check
    rates          tokens per second expected of each depth, 0 first; may be empty
    reads_prompts  whether the draft reads the prompts that come next
    """

    depth: int
    num_drafting: int | None = None
    draft_budget: int = 0
    least_budget: int = 0
    reason: Reason = "rate"
    rates: tuple[float, ...] = ()
    reads_prompts: bool = True
