"""What every depth is expected to yield: tokens per second, and at which budget.

    rate(0) = N / (undrafted + prompts(N))
    rate(d) = max over B of (N + F) / (steps(d) + verify(B) + later(N + F))

N requests, F = F_d(B) expected correct drafts (core.survival_profile). What tokens
cause later, once they are emitted: the draft reads them, and prompts of new requests
take the place of those that ended (core.prompt_steps).

Not decided here: which depth is used (core.auto_policy).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_tetris.core.prompt_steps import PromptSteps
from sglang_tetris.core.round_cost import Load, RoundCost
from sglang_tetris.core.survival_profile import SurvivalProfile

Reals = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DepthRates:
    """See the module; arrays are `[max_depth + 1]`, depth 0 first.

    tokens_per_s     -inf for depths that nothing is known of
    draft_budgets    drafts to verify at the best rate
    token_seconds    what one more emitted token causes later
    """

    tokens_per_s: Reals
    draft_budgets: Reals
    token_seconds: float


def depth_rates(
    load: Load,
    *,
    cost: RoundCost,
    profile: SurvivalProfile,
    prompts: PromptSteps,
    topk: int,
    always_reads: bool,
) -> DepthRates:
    """Return the rates at a load of at least one drafting request.

    topk          branches of a draft step
    always_reads  whether the draft reads prompts also while nothing is drafted
    """

    def later_s(emitted: Reals) -> Reals:
        chance, tokens = prompts.expected(emitted)
        time_s = chance * cost.prompt_s(tokens, is_read=True)
        return time_s + cost.emitted_s(load, emitted)

    drafts, correct = profile.curves(load.num_drafting)
    depths = np.arange(1, len(drafts) + 1)
    emitted = load.batch_size + correct
    steps_s = cost.steps_s(
        load, depth=depths[:, None], topk=topk, num_drafting=load.num_drafting
    )
    drafted = emitted / (steps_s + cost.verify_s(load, drafts) + later_s(emitted))
    best = drafted.argmax(1)
    known = [profile.is_known(depth) for depth in depths.tolist()]
    undrafted = np.array([float(load.batch_size)])
    chance, tokens = prompts.expected(undrafted)
    undrafted_s = cost.undrafted_s(load)
    undrafted_s += float((chance * cost.prompt_s(tokens, is_read=always_reads))[0])
    few, more = later_s(load.batch_size * np.array([1.0, 1.5]))
    return DepthRates(
        tokens_per_s=np.append(
            load.batch_size / undrafted_s,
            np.where(known, drafted[depths - 1, best], -np.inf),
        ),
        draft_budgets=np.append(0.0, np.ceil(drafts[depths - 1, best])),
        token_seconds=float(more - few) / (0.5 * load.batch_size),
    )
