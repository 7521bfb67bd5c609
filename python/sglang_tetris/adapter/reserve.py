"""How many KV slots the scheduler sets aside for a request before a round.

A round with drafts needs SGLang's reserve for a whole tree; one without needs the slot
of a plain decode step. The worker says before the scheduler allocates which it will be.
"""

_plain = False
_given_plain = False


def next_round_is_plain(plain: bool) -> None:
    """Say what the next round of this process will be."""
    global _plain
    _plain = plain


def reserve_of(full: int) -> int:
    """Return the slots of the next round, given those of one with drafts."""
    global _given_plain
    _given_plain = _plain
    return 1 if _plain else full


def holds_drafts() -> bool:
    """Whether what was last set aside is enough for a round with drafts."""
    return not _given_plain
