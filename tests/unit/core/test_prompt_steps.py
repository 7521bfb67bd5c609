"""How often prompts follow a round, and how long they are."""

import numpy as np
import pytest

from sglang_tetris.core.prompt_steps import PromptSteps


def watched(*, share: float, emitted: int, tokens: int, rounds: int) -> PromptSteps:
    """Prompts follow every so many rounds, evenly."""
    steps = PromptSteps()
    due = 0.0
    for _ in range(rounds):
        steps.add_round(emitted)
        due += share
        if due >= 1:
            due -= 1
            steps.add_step(tokens)
    return steps


def test_a_usual_round_is_followed_as_often_as_was_seen():
    steps = watched(share=0.25, emitted=40, tokens=60, rounds=4000)
    chance, tokens = steps.expected(np.array([40.0]))
    # The decay over 1000 rounds leaves the last few a little more weight.
    assert chance[0] == pytest.approx(0.25, rel=0.01)
    assert tokens[0] == pytest.approx(60, rel=0.01)


def test_rare_steps_grow_in_number_frequent_ones_in_length():
    rare = watched(share=0.01, emitted=40, tokens=60, rounds=4000)
    chance, tokens = rare.expected(np.array([40.0, 80.0]))
    assert chance[1] / chance[0] == pytest.approx(2, rel=0.01)
    assert tokens[1] / tokens[0] == pytest.approx(1, rel=0.01)
    always = watched(share=1.0, emitted=40, tokens=60, rounds=4000)
    chance, tokens = always.expected(np.array([40.0, 80.0]))
    assert chance[1] / chance[0] == pytest.approx(1, rel=0.03)
    assert tokens[1] / tokens[0] == pytest.approx(2, rel=0.03)


def test_prompt_tokens_follow_emitted_ones_whatever_the_rounds():
    steps = watched(share=0.5, emitted=40, tokens=60, rounds=4000)
    emitted = np.array([10.0, 40.0, 400.0])
    chance, tokens = steps.expected(emitted)
    assert chance * tokens == pytest.approx(0.75 * emitted, rel=0.01)


@pytest.mark.parametrize("rounds", [0, 5])
def test_without_a_prompt_none_is_expected(rounds):
    steps = PromptSteps()
    for _ in range(rounds):
        steps.add_round(8)
    chance, tokens = steps.expected(np.array([8.0, 16.0]))
    assert chance.tolist() == [0, 0]
    assert tokens.tolist() == [0, 0]


def test_prompts_before_any_round_do_not_divide_by_zero():
    steps = PromptSteps()
    steps.add_step(100)
    assert steps.expected(np.array([8.0]))[0].tolist() == [0]
