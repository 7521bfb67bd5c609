"""Rejection verification of one chain as probabilities, in plain loops.

p has one law more than there are drafts, q one law per draft; laws are sequences of
floats, the laws along the drafts. "token" and "block" are the two rules.
"""

from collections.abc import Iterator, Sequence
from itertools import product

Law = Sequence[float]


def weights(rule: str, p: Sequence[Law], q: Sequence[Law], drafts) -> list[float]:
    """w_0 .. w_n of the block rule; ones for the token rule."""
    out = [1.0]
    for j, token in enumerate(drafts):
        ratio = p[j][token] / q[j][token]
        out.append(min(1.0, out[-1] * ratio) if rule == "block" else 1.0)
    return out


def excess(weight: float, p: Law, q: Law) -> list[float]:
    return [max(weight * a - b, 0.0) for a, b in zip(p, q, strict=True)]


def coin_chances(rule: str, p: Sequence[Law], q: Sequence[Law], drafts) -> list[float]:
    """Probability that the coin of each draft falls."""
    n = len(drafts)
    if rule == "token":
        return [min(1.0, p[j][x] / q[j][x]) for j, x in enumerate(drafts)]
    w = weights(rule, p, q, drafts)
    chances = []
    for j in range(1, n):
        over = sum(excess(w[j], p[j], q[j]))
        whole = over + 1 - w[j]
        chances.append(over / whole if whole > 0 else 1.0)
    return chances + w[n:] if n else []


def num_correct(rule: str, falls: Sequence[bool]) -> int:
    """How many drafts are correct, given which coins fell."""
    if rule == "block":
        return max([j + 1 for j, fell in enumerate(falls) if fell], default=0)
    return next((j for j, fell in enumerate(falls) if not fell), len(falls))


def final_law(
    rule: str, p: Sequence[Law], q: Sequence[Law], drafts, correct: int
) -> list[float]:
    """Law of the token drawn after that many correct drafts."""
    law = list(p[correct])
    if correct < len(drafts):
        w = weights(rule, p, q, drafts)[correct]
        over = excess(w, p[correct], q[correct])
        law = over if sum(over) > 0 else law
    return [value / sum(law) for value in law]


def outcomes(
    rule: str, p: Sequence[Law], q: Sequence[Law], drafts
) -> Iterator[tuple[tuple[bool, ...], float, int, list[float]]]:
    """Which coins fall, with what probability, drafts then correct, the final law."""
    chances = coin_chances(rule, p, q, drafts)
    for falls in product((True, False), repeat=len(drafts)):
        probability = 1.0
        for fell, chance in zip(falls, chances, strict=True):
            probability *= chance if fell else 1 - chance
        correct = num_correct(rule, falls)
        yield falls, probability, correct, final_law(rule, p, q, drafts, correct)
