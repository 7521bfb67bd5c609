"""Two rounds of two requests; the second budget comes from the first round.

A round emits one to three tokens per request, so the second round begins after any of
39 texts of each. Both rounds are enumerated in full, and texts of unequal length are
continued by the target to six tokens. The second budget may depend on the first round's
draws and on how many of them were correct.
"""

from collections.abc import Callable
from functools import cache
from itertools import product

import numpy as np
import torch

from sglang_tetris.core import DraftBudget, FixedBudget
from tests.reference.emitted import DEPTH, Emitted, by_chains, continued
from tests.reference.enumeration import (
    ValueRule,
    chain_values,
    draft_law,
    joined,
    keep_of,
    kept,
)
from tests.reference.worlds import VOCAB, World, laws_after

LENGTH = 6
TEXT_LENS = np.repeat([1, 2, 3], [3, 9, 27])
TEXTS = [text for k in (1, 2, 3) for text in product(range(VOCAB), repeat=k)]


def joint_laws(
    pair: list[World],
    rule: ValueRule,
    make_policy: Callable[[], DraftBudget],
    verifications: list[str],
) -> tuple[dict[str, np.ndarray], set[int]]:
    """Joint law of six tokens of each request, [729, 729], for each verification.

    Also the second round's budgets, for which the policy is not shown the survivals: it
    is given NaN in their place. A policy with a method `saw` is told before how many of
    the first round's verified drafts were correct.
    """
    first_counts, second_budgets = _first_round(pair, rule, make_policy)
    budgets = set(second_budgets.flatten().tolist()) - {-1}
    after = [[_after(world, text) for text in TEXTS] for world in pair]
    values = [[chain_values(world, rule) for world in worlds] for worlds in after]

    @cache
    def counts(budget: int, i: int, j: int) -> np.ndarray:
        return kept((values[0][i], values[1][j]), FixedBudget(budget)).sum(-1)

    laws = {}
    for verification in verifications:
        emitted = iter(by_chains([*pair, *after[0], *after[1]], verification))
        starts = [_starts(world, next(emitted)) for world in pair]
        goes_on = [[_goes_on(w, next(emitted)) for w in worlds] for worlds in after]
        blocks = np.zeros((len(TEXTS), 27, len(TEXTS), 27))
        for b, correct in product(budgets, product(range(DEPTH + 1), repeat=2)):
            here = second_budgets[(..., *correct)] == b
            mass = joined(starts, np.where(here[..., None], first_counts, -1))
            lens = np.logical_and.outer(*(1 + c == TEXT_LENS for c in correct))
            for i, j in np.argwhere((mass > 0) & lens):
                second = joined((goes_on[0][i], goes_on[1][j]), counts(b, i, j))
                blocks[i, :, j] += mass[i, j] * second
        laws[verification] = _to_full_length(pair, blocks)
    return laws, budgets


def _first_round(
    pair: list[World], rule: ValueRule, make_policy: Callable[[], DraftBudget]
) -> tuple[np.ndarray, np.ndarray]:
    """Drafts verified, [9, 9, request], and the budget that follows.

    The budget also by each request's correct drafts, [9, 9, 3, 3]; -1 for draws that
    are never made.
    """
    values = [chain_values(world, rule) for world in pair]
    counts = np.full((9, 9, 2), -1)
    budgets = np.full((9, 9, DEPTH + 1, DEPTH + 1), -1)
    possible = [~np.isnan(own).any(1) for own in values]
    for i, j in np.argwhere(np.logical_and.outer(*possible)):
        both = np.stack([values[0][i], values[1][j]])
        for correct in product(range(DEPTH + 1), repeat=2):
            policy = make_policy()
            counts[i, j] = keep_of(both, policy).sum(-1)
            if hasattr(policy, "saw"):
                policy.saw(sum(correct))
            budgets[(i, j, *correct)] = policy.draft_budget(
                survival=torch.full((2, DEPTH), torch.nan),
                num_nodes=torch.tensor([DEPTH, DEPTH]),
                total_kv_tokens=0,
            )
    return counts, budgets


def _after(world: World, text: tuple[int, ...]) -> World:
    return World(laws_after(world.p, text)[:3], laws_after(world.q, text)[:3])


def _starts(world: World, emitted: Emitted) -> np.ndarray:
    """Mass of each text, [n, draw, 39]."""
    flat = [masses.reshape(*masses.shape[:2], -1) for masses in emitted]
    return draft_law(world)[:, None] * np.concatenate(flat, -1)


def _goes_on(world: World, emitted: Emitted) -> np.ndarray:
    """Mass of the three tokens after a text, [n, draw, 27]."""
    return draft_law(world)[:, None] * continued(emitted, world)


def _to_full_length(pair: list[World], blocks: np.ndarray) -> np.ndarray:
    """From [text, 27, text, 27] to whole texts of six tokens, [729, 729]."""
    rests = [_rests(world) for world in pair]
    total = np.zeros((VOCAB**LENGTH,) * 2)
    for (rows, rest), (columns, other) in product(rests[0], rests[1]):
        block = blocks[rows][:, :, columns].reshape(len(rest), 1, len(other), 1)
        whole = block * rest[:, :, None, None] * other
        total += whole.reshape(total.shape)
    return total


def _rests(world: World) -> list[tuple[slice, np.ndarray]]:
    """The texts of 1, 2 and 3 tokens, and the law of what is missing three later."""
    p = world.p
    return [
        (slice(0, 3), (p[4][..., None] * p[5]).reshape(3**4, 9)),
        (slice(3, 12), p[5].reshape(3**5, 3)),
        (slice(12, 39), np.ones((3**6, 1))),
    ]
