"""Sums over rounds, kept apart for the warm-up and what follows it."""

from collections import Counter
from dataclasses import dataclass, field

from sglang_tetris.simulator.clock import total_s
from sglang_tetris.simulator.policies.base import FinishedRound


@dataclass(slots=True, kw_only=True)
class Sums:
    """One span of rounds."""

    num_rounds: int = 0
    num_tokens: int = 0
    num_correct: int = 0
    num_verified: int = 0
    round_s: float = 0.0
    prompt_s: float = 0.0
    depths: Counter[int] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def tokens_per_s(self) -> float:
        """Tokens emitted by rounds, over all time, prompts included."""
        time_s = self.round_s + self.prompt_s
        return self.num_tokens / time_s if time_s else 0.0

    @property
    def prompt_share(self) -> float:
        """Share of the time that went into prompts."""
        time_s = self.round_s + self.prompt_s
        return self.prompt_s / time_s if time_s else 0.0

    @property
    def correct_per_round(self) -> float:
        return self.num_correct / self.num_rounds if self.num_rounds else 0.0

    @property
    def verified_per_round(self) -> float:
        return self.num_verified / self.num_rounds if self.num_rounds else 0.0


@dataclass(slots=True)
class RoundTotals:
    """`warm_up_rounds` rounds are counted apart."""

    warm_up_rounds: int = 200
    warm_up: Sums = field(default_factory=Sums)
    steady: Sums = field(default_factory=Sums)

    def _current(self) -> Sums:
        warming = self.warm_up.num_rounds < self.warm_up_rounds
        return self.warm_up if warming else self.steady

    def add(self, finished: FinishedRound) -> None:
        """Count one round."""
        sums = self._current()
        sums.num_rounds += 1
        sums.num_tokens += finished.load.batch_size + finished.num_correct
        sums.num_correct += finished.num_correct
        sums.num_verified += finished.num_drafts
        sums.round_s += total_s(finished.parts)
        sums.depths[finished.plan.depth] += 1
        sums.reasons[finished.plan.reason] += 1

    def add_prompts(self, time_s: float) -> None:
        """Count a step that read prompts."""
        self._current().prompt_s += time_s

    @property
    def tokens_per_s(self) -> float:
        """Of all rounds, the warm-up included."""
        tokens = self.warm_up.num_tokens + self.steady.num_tokens
        spans = (self.warm_up, self.steady)
        time_s = sum(span.round_s + span.prompt_s for span in spans)
        return tokens / time_s if time_s else 0.0
