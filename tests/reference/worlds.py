"""Worlds of three tokens: a target and a draft whose laws depend on the whole text.

A law table holds one law per text: `laws[k]` has shape [3] * k + [3], the law of the
token after each text of k tokens. A text is a tuple of tokens, counted from where the
enumeration begins; what came before differs between requests, so each has tables of its
own.
"""

from dataclasses import dataclass

import numpy as np

VOCAB = 3
Laws = list[np.ndarray]


@dataclass(frozen=True)
class World:
    """One request's target laws p and draft laws q, as deep as the enumeration goes."""

    p: Laws
    q: Laws

    @property
    def length(self) -> int:
        return len(self.p)


def random_world(rng: np.random.Generator, length: int, *, sparse: bool) -> World:
    """Laws drawn evenly from all there are; `sparse` has zeros in half of them."""
    return World(*(_random_laws(rng, length, sparse) for _ in range(2)))


def random_pair(seed: int, length: int = 3, *, sparse: bool = False) -> list[World]:
    """Two requests' worlds, not alike."""
    rng = np.random.default_rng(seed)
    return [random_world(rng, length, sparse=sparse) for _ in range(2)]


def _random_laws(rng: np.random.Generator, length: int, sparse: bool) -> Laws:
    laws = []
    for k in range(length):
        table = rng.dirichlet(np.ones(VOCAB), (VOCAB,) * k)
        if sparse:
            zero = rng.integers(0, 2 * VOCAB, table.shape[:-1])
            table[np.arange(VOCAB) == zero[..., None]] = 0
            table /= table.sum(-1, keepdims=True)
        laws.append(table)
    return laws


def text_law(laws: Laws) -> np.ndarray:
    """Probability of every text of len(laws) tokens, shape [3] * len(laws)."""
    whole = np.ones(())
    for table in laws:
        whole = whole[..., None] * table
    return whole


def laws_after(laws: Laws, text: tuple[int, ...]) -> Laws:
    """The tables as they are once `text` has been written."""
    return [table[text] for table in laws[len(text) :]]


def total_variation(law: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(law - other).sum() / 2)
