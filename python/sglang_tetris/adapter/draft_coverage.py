"""How much of each request's text the draft's KV holds, and what it can catch up on.

The draft reads one *entry* per token: entry i is (the target's hidden state at i, token
i + 1), at draft position i + lead; a standalone draft (lead 1) needs the token only.
With n committed tokens there are n entries, 0 .. n - 1. Per request

    covered   entries 0 .. covered - 1 went through the draft, as far as they could
    start     draft positions below hold nothing that may be read

and per KV slot a mark whether the draft has written it. Target and draft share slots,
so the marks follow the text into the radix cache and to whoever hits it there: a prompt
whose cached part has unmarked slots starts after the last of them.

While nothing is drafted, the last `kept_tokens` entries of each request are kept in a
ring, those of its prompt too where the draft did not read it. When drafting begins
again they go through the draft at once. A request that has more text than that since
then has a gap, and starts after it. Rounds are put there, and their slots unmarked,
some at a time, since each time costs a round without drafts some 1 %.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sglang_tetris.adapter.attention.cpu import CpuAttentionBackend
from sglang_tetris.adapter.draft_rows import entries_of, ragged

_MOST_ROUNDS = 16  # that are put into the ring at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Entries of some requests, one request after another.

    first   first entry of each request
    lens    how many each
    tokens  [sum(lens)] int64; hidden [sum(lens), ...] or None
    """

    first: list[int]
    lens: list[int]
    tokens: torch.Tensor
    hidden: torch.Tensor | None


class _Round(NamedTuple):
    """What a round kept: arguments of `DraftCoverage.keep`, slots to be unmarked."""

    rows: list[int]
    seq_lens: list[int]
    lens: list[int]
    tokens: torch.Tensor
    hidden: torch.Tensor | None
    slots: torch.Tensor


class DraftCoverage:
    """See the module. Rows are those of SGLang's `req_to_token`; one per worker.

    starts        [rows] int64 on the device, for the draft's attention
    takes_starts  whether that attention can start within a request
    """

    def __init__(
        self,
        *,
        req_to_token_pool: Any,
        num_slots: int,
        lead: int,
        kept_tokens: int,
        takes_starts: bool,
        device: str,
    ) -> None:
        rows = req_to_token_pool.req_to_token.shape[0]
        self.lead = lead
        self.starts = torch.zeros(rows, dtype=torch.int64, device=device)
        self._pool = req_to_token_pool
        self._kept = kept_tokens
        self.takes_starts = takes_starts
        self._written = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self._covered = [0] * rows
        self._has_start = [False] * rows
        self._tokens = torch.zeros(rows, kept_tokens, dtype=torch.int64, device=device)
        # Tests: what is done to the draft's KV at slots that may not be read.
        self.spoil: Callable[[torch.Tensor], None] | None = None
        # Made when the first hidden states show their shape, during warm-up.
        self._hidden: torch.Tensor | None = None
        # Rounds that are not in the ring yet, and the most tokens of a request in them.
        self._rounds: list[_Round] = []
        self._longest = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes that the kept entries take."""
        self._settle()
        kept = [self._tokens] if self._hidden is None else [self._tokens, self._hidden]
        return sum(tensor.nbytes for tensor in kept)

    def is_current(self, row: int, seq_len: int) -> bool:
        """Whether all of a request's entries went through the draft."""
        return self._covered[row] == seq_len

    def can_draft(self, row: int, seq_len: int) -> bool:
        """Whether the draft can be made to hold what a request needs.

        Not so if only a later part could be read and the draft's attention cannot
        start anywhere but at the beginning.
        """
        if self.takes_starts:
            return True
        return not self._has_start[row] and seq_len - self._covered[row] <= self._kept

    def begin_prompt(self, rows: list[int], prefix_lens: list[int]) -> None:
        """Find where each prompt's draft attention starts, from its cached part."""
        self._settle()
        for row, prefix in zip(rows, prefix_lens, strict=True):
            slots = self._pool.req_to_token[row, :prefix].to(torch.int64)
            gaps = (~self._written[slots]).nonzero()
            self._set_start(row, int(gaps[-1]) + 1 if len(gaps) else 0)

    def end_prompt(
        self, rows: list[int], ends: list[int], next_tokens: torch.Tensor
    ) -> None:
        """Note that the draft ran over each prompt's tokens up to `ends`.

        For a standalone draft the first emitted token's entry is still to come.
        """
        for row, end in zip(rows, ends, strict=True):
            self._covered[row] = end - self.lead
        if self.lead:
            at = torch.tensor(rows, device=next_tokens.device)
            columns = torch.tensor([(end - 1) % self._kept for end in ends])
            self._tokens[at, columns.to(at.device)] = next_tokens.to(torch.int64)

    def skip_prompt(
        self,
        rows: list[int],
        begins: list[int],
        lens: list[int],
        tokens: torch.Tensor,
        next_tokens: torch.Tensor,
        hidden: torch.Tensor | None,
        slots: torch.Tensor,
    ) -> None:
        """Keep the end of each prompt, which the draft does not run over now.

        begins, lens  the part of each prompt that the target ran over; begin_prompt
                      has seen it
        tokens, hidden, slots  of these parts, one after another; next_tokens [rows]
        """
        self._settle()
        at = 0
        for place, (row, begin, length) in enumerate(
            zip(rows, begins, lens, strict=True)
        ):
            end, self._covered[row] = begin + length, begin - self.lead
            first = max(begin - self.lead, end - self._kept)
            columns = torch.arange(first, end, device=tokens.device) % self._kept
            text = torch.cat([tokens[at : at + length], next_tokens[place, None]])
            self._tokens[row, columns] = text[first + 1 - begin :].to(torch.int64)
            if hidden is not None:
                ring = self._hidden_ring(hidden)
                ring[row, columns] = hidden[at + first - begin : at + length]
            at += length
        self._unmark(slots)

    def wrote(self, slots: torch.Tensor) -> None:
        """Mark slots whose tokens the draft has just gone through."""
        self._settle()
        self._written[slots] = True

    def cover(self, rows: list[int], seq_lens: list[int]) -> None:
        """Note that all entries of these requests went through the draft."""
        for row, seq_len in zip(rows, seq_lens, strict=True):
            self._covered[row] = seq_len

    def keep(
        self,
        rows: list[int],
        seq_lens: list[int],
        lens: list[int],
        tokens: torch.Tensor,
        hidden: torch.Tensor | None,
        slots: torch.Tensor,
    ) -> None:
        """Keep the entries of a round that do not go through the draft now.

        seq_lens  committed tokens before the round, so the first new entry
        lens      tokens that the round emitted, at most `kept_tokens` each
        tokens, hidden, slots  of the entries, `[sum(lens)]`; not to be changed later
        """
        # A standalone draft may have gone through the anchor already.
        begins = [self._covered[row] + self.lead for row in rows]
        if any(begin > seq for begin, seq in zip(begins, seq_lens, strict=True)):
            begin = torch.tensor(begins).repeat_interleave(torch.tensor(lens))
            _, entries = entries_of(rows, seq_lens, lens)
            slots = slots[(entries >= begin).to(slots.device)]
        longest = max(lens)
        # In one go no two entries may want the same place of the ring.
        if len(self._rounds) == _MOST_ROUNDS or self._longest + longest > self._kept:
            self._settle()
        self._rounds.append(_Round(rows, seq_lens, lens, tokens, hidden, slots))
        self._longest += longest

    def take(self, rows: list[int], seq_lens: list[int]) -> Entries:
        """Return the entries these requests lack, as far as they were kept.

        A request that lacks more starts after what was lost.
        """
        self._settle()
        first, lens = [], []
        for row, seq_len in zip(rows, seq_lens, strict=True):
            begin = max(self._covered[row], seq_len - self._kept)
            if begin > self._covered[row]:
                self._set_start(row, begin + self.lead)
            first.append(begin)
            lens.append(seq_len - begin)
        device = self._tokens.device
        at = torch.tensor(rows, device=device)
        at = at.repeat_interleave(torch.tensor(lens, device=device))
        columns = ragged(first, lens, device) % self._kept
        hidden = None
        if not self.lead:
            assert self._hidden is not None, "an EAGLE draft's entries carry hidden"
            hidden = self._hidden[at, columns]
        return Entries(
            first=first, lens=lens, tokens=self._tokens[at, columns], hidden=hidden
        )

    def unwritten(self) -> torch.Tensor:
        """Return all slots that the draft may not read, `[n]` int64."""
        self._settle()
        return (~self._written).nonzero().flatten()

    def _settle(self) -> None:
        """Put what rounds kept into the ring, and unmark their slots."""
        if not self._rounds:
            return
        rounds, self._rounds, self._longest = self._rounds, [], 0
        places = [entries_of(kept.rows, kept.seq_lens, kept.lens) for kept in rounds]
        at = torch.cat([rows for rows, _ in places])
        columns = torch.cat([entries for _, entries in places]) % self._kept
        device = self._tokens.device
        at, columns = at.to(device), columns.to(device)
        self._tokens[at, columns] = torch.cat([kept.tokens for kept in rounds])
        parts = [kept.hidden for kept in rounds if kept.hidden is not None]
        if parts:
            hidden = torch.cat(parts)
            self._hidden_ring(hidden)[at, columns] = hidden
        self._unmark(torch.cat([kept.slots for kept in rounds]))

    def _hidden_ring(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._hidden is None:
            shape = (len(self._covered), self._kept, *hidden.shape[1:])
            self._hidden = hidden.new_empty(shape)
        return self._hidden

    def _unmark(self, slots: torch.Tensor) -> None:
        self._written[slots] = False
        if self.spoil is not None:
            self.spoil(slots)

    def _set_start(self, row: int, start: int) -> None:
        if start or self._has_start[row]:
            self.starts[row] = start
            self._has_start[row] = start > 0


def make_coverage(draft_worker: Any, kept_tokens: int) -> DraftCoverage:
    """Return the coverage of a draft worker, and let its attention read the starts.

    Only this package's CPU backend can start within a request; elsewhere a request with
    a gap is decoded without drafts.
    """
    runner = draft_worker.draft_runner
    pool = runner.token_to_kv_pool
    backends = [runner.attn_backend, draft_worker.draft_attn_backend]
    takes_starts = isinstance(runner.attn_backend, CpuAttentionBackend)
    coverage = DraftCoverage(
        req_to_token_pool=draft_worker.req_to_token_pool,
        num_slots=pool.get_key_buffer(pool.start_layer).shape[0],
        lead=draft_worker.lead,
        kept_tokens=kept_tokens,
        takes_starts=takes_starts,
        device=draft_worker.device,
    )
    if takes_starts:
        for backend in backends:
            if backend is not None:
                backend.kv_starts = coverage.starts
    return coverage
