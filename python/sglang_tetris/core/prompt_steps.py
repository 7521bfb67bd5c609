"""How often prompts come between rounds, and how long they are then.

Waiting prompts are read together before the next round, so a round is followed by one
prompt step or none. A round that emits more tokens ends more requests, and lets more
new ones in. With a mean of m tokens per round and a share s of rounds that prompts
follow, a round of x tokens is expected to be followed by prompts

    with probability   p(x) = 1 - (1 - s) ^ (x / m)
    of tokens          c x / p(x),   c = prompt tokens per emitted token

so twice the tokens per round bring nearly twice the prompt steps where these are rare,
and longer ones where they come every time: then fewer rounds mean fewer of them.

Not decided here: what such a step costs (core.round_cost).
"""

import numpy as np
import numpy.typing as npt

Reals = npt.NDArray[np.float64]

# Rounds that are remembered, about: at one request at a time, some prompts.
_MEMORY = 1000.0
# A share of 1 would say nothing about shorter rounds.
_LARGEST_SHARE = 0.98


class PromptSteps:
    """Decayed counts; see the module."""

    def __init__(self) -> None:
        self._rounds = self._emitted = 0.0
        self._steps = self._tokens = 0.0

    def add_round(self, num_emitted: float) -> None:
        """Count a round that emitted so many tokens, the whole batch."""
        keep = 1.0 - 1.0 / _MEMORY
        self._rounds = keep * self._rounds + 1.0
        self._emitted = keep * self._emitted + num_emitted
        self._steps *= keep
        self._tokens *= keep

    def add_step(self, num_tokens: int) -> None:
        """Count a step that read so many tokens of prompts."""
        self._steps += 1.0
        self._tokens += num_tokens

    def expected(self, emitted: Reals) -> tuple[Reals, Reals]:
        """Return (p, tokens) after rounds that emit so many; p is 0 before any step."""
        if not self._steps or not self._emitted:
            return np.zeros_like(emitted), np.zeros_like(emitted)
        share = min(self._steps / self._rounds, _LARGEST_SHARE)
        relative = emitted * (self._rounds / self._emitted)
        chance = 1.0 - (1.0 - share) ** relative
        tokens = emitted * (self._tokens / self._emitted) / chance
        return chance, tokens
