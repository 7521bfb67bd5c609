"""What was proposed, verified and correct: counters that add up.

A request's counters are the sum of its rounds, a server's the sum of its requests, so
every rate follows from the same four sums wherever it is shown. A draft is proposed
when the draft model made it, verified when the target really was given it, correct when
it was verified and the target agreed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_tetris.core.errors import check_count


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounters:
    """Sums over rounds; a round is one request in one step.

    num_rounds           rounds, one bonus token each
    num_proposed_drafts  drafted
    num_verify_drafts    sent to the target, anchors not counted
    num_correct_drafts   agreed, bonus tokens not counted

    Raises ValueError unless correct <= verified <= proposed.
    """

    num_rounds: int = 0
    num_proposed_drafts: int = 0
    num_verify_drafts: int = 0
    num_correct_drafts: int = 0

    def __post_init__(self) -> None:
        check_count("num_rounds", self.num_rounds)
        check_count("num_correct_drafts", self.num_correct_drafts)
        for name, least in (
            ("num_verify_drafts", self.num_correct_drafts),
            ("num_proposed_drafts", self.num_verify_drafts),
        ):
            check_count(name, getattr(self, name), minimum=least)

    def __add__(self, other: "DraftCounters") -> "DraftCounters":
        return DraftCounters(
            num_rounds=self.num_rounds + other.num_rounds,
            num_proposed_drafts=self.num_proposed_drafts + other.num_proposed_drafts,
            num_verify_drafts=self.num_verify_drafts + other.num_verify_drafts,
            num_correct_drafts=self.num_correct_drafts + other.num_correct_drafts,
        )

    @property
    def num_trimmed_drafts(self) -> int:
        """Drafts that were made but not verified."""
        return self.num_proposed_drafts - self.num_verify_drafts

    @property
    def num_accept_tokens(self) -> int:
        """Tokens emitted, bonus tokens included."""
        return self.num_correct_drafts + self.num_rounds

    @property
    def accept_length(self) -> float:
        """Tokens per round with the bonus token; 0 before the first round."""
        return self.num_accept_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def accept_rate(self) -> float:
        """Correct drafts per verified draft; 0 where none was verified."""
        if not self.num_verify_drafts:
            return 0.0
        return self.num_correct_drafts / self.num_verify_drafts


def count_round(
    *,
    num_nodes: Sequence[int],
    verify_lens: Sequence[int],
    accept_lens: Sequence[int],
) -> list[DraftCounters]:
    """Return one step's counters per request, from host values.

    The arguments are those of DraftTrees, Allocation and AcceptResult; the last two
    count the anchor and the bonus token. ValueError for lengths that do not agree.
    """
    if not len(num_nodes) == len(verify_lens) == len(accept_lens):
        raise ValueError(
            "num_nodes, verify_lens and accept_lens must be of one length, got "
            f"{len(num_nodes)}, {len(verify_lens)} and {len(accept_lens)}"
        )
    return [
        DraftCounters(
            num_rounds=1,
            num_proposed_drafts=proposed,
            num_verify_drafts=verified - 1,
            num_correct_drafts=accepted - 1,
        )
        for proposed, verified, accepted in zip(
            num_nodes, verify_lens, accept_lens, strict=True
        )
    ]
