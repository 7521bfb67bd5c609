"""Rates against the formula, worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from sglang_tetris.core.depth_rates import DepthRates, depth_rates
from sglang_tetris.core.prompt_steps import PromptSteps
from sglang_tetris.core.round_cost import Load, RoundCost
from sglang_tetris.core.survival_profile import SurvivalProfile
from tests.unit.core.test_round_cost import flat

LOAD = Load(batch_size=4, num_drafting=4, total_kv_tokens=0)
FREE_ROWS = replace(
    flat(20),
    phases={"decode": flat(20), "draft_step": flat(5), "draft_extend": flat(4)},
)
COSTLY_ROWS = replace(flat(10, 10), phases={**FREE_ROWS.phases, "decode": flat(10, 10)})


def chains(*survivals: float, rounds: int = 300) -> SurvivalProfile:
    """What is known after many rounds of chains of these survivals."""
    profile = SurvivalProfile(len(survivals))
    survival = np.array([survivals] * 4, np.float32)
    depths = np.array([range(1, len(survivals) + 1)] * 4)
    for _ in range(rounds):
        profile.add(survival, depths, drafted_depth=len(survivals))
    return profile


def rates(
    profile: SurvivalProfile, cost=FREE_ROWS, *, prompts=None, always_reads=True
) -> DepthRates:
    return depth_rates(
        LOAD,
        cost=RoundCost(cost),
        profile=profile,
        prompts=prompts or PromptSteps(),
        topk=1,
        always_reads=always_reads,
    )


def test_rates_are_tokens_over_seconds():
    found = rates(chains(0.8, 0.5))
    expected = [4 / 20e-3, 4 * 1.8 / 24e-3, 4 * 2.3 / 29e-3]
    assert found.tokens_per_s == pytest.approx(expected, rel=0.03)
    # Rows are free: all are verified.
    assert found.draft_budgets.tolist() == [0, 4, 8]


def test_budgets_leave_out_what_is_not_worth_its_row():
    """A row costs 10 ms, at 80 tokens/s worth 0.8: only the first level pays."""
    found = rates(chains(0.95, 0.1), COSTLY_ROWS)
    assert found.draft_budgets[1:].tolist() == [4, 4]
    assert found.tokens_per_s[2] < found.tokens_per_s[1]


def test_unknown_depths_have_no_rate():
    profile = SurvivalProfile(2)
    profile.add(np.full((4, 1), 0.8, np.float32), np.ones((4, 1), int), drafted_depth=1)
    assert np.isneginf(rates(profile).tokens_per_s).tolist() == [False, False, True]


def after_prompts() -> PromptSteps:
    """A prompt of 50 tokens after every round of 4 tokens."""
    prompts = PromptSteps()
    for _ in range(5000):
        prompts.add_round(4)
        prompts.add_step(50)
    return prompts


def test_prompts_between_rounds_favour_rounds_of_many_tokens():
    """A prompt step of 30 ms follows every round, however many tokens it emits."""
    cost = replace(FREE_ROWS, phases={**FREE_ROWS.phases, "prompt": flat(30)})
    found = rates(chains(0.8, 0.5), cost, prompts=after_prompts(), always_reads=False)
    expected = [4 / 50e-3, 4 * 1.8 / 58e-3, 4 * 2.3 / 63e-3]
    assert found.tokens_per_s == pytest.approx(expected, rel=0.05)


def test_a_draft_that_reads_prompts_anyway_makes_plain_rounds_dearer():
    cost = replace(FREE_ROWS, phases={**FREE_ROWS.phases, "prompt": flat(30)})
    alone, along = (
        rates(chains(0.8), cost, prompts=after_prompts(), always_reads=always)
        for always in (False, True)
    )
    assert along.tokens_per_s[0] == pytest.approx(4 / 54e-3, rel=0.03)
    assert along.tokens_per_s[0] < alone.tokens_per_s[0]
    assert along.tokens_per_s[1] == alone.tokens_per_s[1]


def test_a_token_costs_what_it_causes_later():
    phases = {**FREE_ROWS.phases, "draft_extend": flat(4, 0.5)}
    found = rates(chains(0.8), replace(FREE_ROWS, phases=phases))
    assert found.token_seconds == pytest.approx(0.5e-3, rel=0.05)
