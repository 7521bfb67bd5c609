"""Made-up recordings with the statistics of real ones, for tests and first looks.

Every token of a request has an ease, a slow and a fast part, and every draft of it is
judged with some error. From the judgement q follow the true probabilities of the three
most likely children

    q,  0.45 (1 - q),  0.15 (1 - q)

about 0.55, 0.2 and 0.07 at the first level and a little less below. What the draft
model says of itself is sharper: logit(raw) = overconfidence * logit(q) + 0.3. Requests
differ in their ease, so that there is something to gain by moving drafts between them.
"""

import bisect
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sglang_tetris.core.replay import ReplayHeader, ReplayRequest, write_replay

Reals = npt.NDArray[np.float64]
Position = tuple[int, int, list[int], list[float], list[int]]

KINDS = ("chat", "code", "maths", "text")
_KIND_EASE = (-0.2, 0.6, 0.3, -0.5)
_MAX_CHAIN, _NUM_STEPS, _TOPK = 8, 4, 3
_SECOND, _THIRD = 0.45, 0.15
_FIRST_EASE, _LEVEL_EASE = 0.25, -0.12
_SHIFT = 0.3  # of an over-confident draft's logits


def write_synthetic_replay(
    path: Path,
    *,
    num_requests: int = 24,
    tokens: tuple[int, int] = (64, 120),
    overconfidence: float = 1.4,
    seed: int = 0,
) -> None:
    """Write a recording of `num_requests` requests of `tokens` (least, most) tokens.

    overconfidence  1.0 = the draft's probabilities are honest
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(tokens[0], tokens[1] + 1, num_requests)
    header = ReplayHeader(
        requests=tuple(
            ReplayRequest(
                kind=KINDS[index % len(KINDS)],
                sampling_class=2 * (index // len(KINDS) % 2),
                prompt_tokens=int(rng.integers(20, 120)),
            )
            for index in range(num_requests)
        ),
        max_chain=_MAX_CHAIN,
        num_steps=_NUM_STEPS,
        topk=_TOPK,
        provenance={"synthetic": True, "seed": seed, "overconfidence": overconfidence},
    )
    write_replay(
        path,
        header,
        (
            position
            for index, length in enumerate(lengths.tolist())
            for position in _request(
                rng, index, length, _KIND_EASE[index % len(KINDS)], overconfidence
            )
        ),
    )


def _request(
    rng: np.random.Generator, index: int, length: int, ease: float, sharp: float
) -> Iterator[Position]:
    """Yield the positions 1 to length - 1 of one request."""
    own = ease + rng.normal(0, 0.7)
    tokens = np.empty(length + _MAX_CHAIN)
    slow = 0.0
    for token in range(len(tokens)):
        slow = 0.7 * slow + rng.normal(0, 0.6)
        tokens[token] = own + slow + rng.normal(0, 0.9)
    for position in range(1, length):
        left = tokens[position : min(position + _MAX_CHAIN, length)]
        yield (index, position, *_tree(rng, left.tolist(), own, sharp))


def _children(first: float) -> tuple[float, ...]:
    """Return the probabilities of the three likeliest, given that of the first."""
    return first, _SECOND * (1 - first), _THIRD * (1 - first)


def _tree(
    rng: np.random.Generator, left: list[float], own: float, sharp: float
) -> tuple[list[int], list[float], list[int]]:
    """Grow one tree; `left` is the ease of the text's next tokens."""
    parents: list[int] = []
    probs: list[float] = []
    on_path: list[int] = []
    shift = _SHIFT if sharp > 1 else 0.0
    # Nodes to extend: index, survival, whether in the text, whether on the chain.
    frontier = [(-1, 1.0, True, True)]
    for level in range(_MAX_CHAIN):
        grown = []
        beam = sorted(frontier, key=lambda node: -node[1])[:_TOPK]
        if level >= _NUM_STEPS:
            beam = []
        for node in frontier:
            index, survival, in_text, on_chain = node
            if node not in beam and not on_chain:
                continue
            in_text = in_text and level < len(left)
            ease = left[level] if in_text else own + rng.normal(0, 1.3)
            ease += _FIRST_EASE + _LEVEL_EASE * level + rng.normal(0, 0.5)
            truth = _children(1 / (1 + math.exp(-ease)))
            said = _children(1 / (1 + math.exp(-(sharp * ease + shift))))
            chosen = bisect.bisect_right(
                list(itertools.accumulate(truth)), rng.random()
            )
            best = said.index(max(said))
            for child in range(_TOPK):
                if node not in beam and child != best:
                    continue
                correct = in_text and child == chosen
                if correct:
                    on_path.append(len(parents))
                grown.append(
                    (
                        len(parents),
                        survival * said[child],
                        correct,
                        on_chain and child == best,
                    )
                )
                parents.append(index)
                probs.append(float(said[child]))
        frontier = grown
    return parents, probs, on_path
