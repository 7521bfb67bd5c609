"""Who drafts in a round, and what happens to the tokens that others emitted.

A request drafts when the round's plan wants drafts of it, it may have some verified,
and the draft's KV can be made to hold its text (draft_coverage.py). What a round
emitted goes through the draft at once if its request is to draft next; otherwise it is
kept, and caught up in bulk when the request drafts again.
"""

from typing import Any, NamedTuple

import torch
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.spec_utils import draft_tp_context

from sglang_tetris.adapter.draft_coverage import DraftCoverage
from sglang_tetris.adapter.draft_rows import (
    blank_state,
    put_rows,
    rows_of,
    spread,
    spread_trees,
)
from sglang_tetris.adapter.round_clock import RoundClock
from sglang_tetris.adapter.round_record import RoundRecord
from sglang_tetris.adapter.round_view import RoundView, prompt_load_of
from sglang_tetris.adapter.undrafted import no_drafts
from sglang_tetris.core import DraftTrees
from sglang_tetris.core.round_plan import RoundPlan


class Drafting:
    """Drives a draft worker over the requests that draft; one per worker."""

    def __init__(
        self, draft_worker: Any, coverage: DraftCoverage, clock: RoundClock
    ) -> None:
        self.coverage = draft_worker.coverage = coverage
        self._worker = draft_worker
        self._clock = clock
        self._topk = draft_worker.topk
        self._turn = 0
        # Of the last drafts, where they were drawn: [bs, depth, Vd].
        self.laws: torch.Tensor | None = None

    def prompt_step(
        self, batch: Any, target: Any, kv_loc_plan: Any, plan: RoundPlan
    ) -> EagleDraftInput:
        """Run the draft over the prompt part that the target has just processed.

        Where the plan does not want it, only the end is kept, to be caught up on.
        """
        rows = batch.req_pool_indices_cpu.tolist()
        self.coverage.begin_prompt(rows, batch.prefix_lens)
        if not self._reads(batch, plan):
            return self._skip_prompts(batch, target, rows)
        slots, ends = batch.out_cache_loc, batch.seq_lens_cpu.tolist()
        sampler, hidden = self._worker.sampler, target.logits_output.hidden_states
        last = torch.tensor(batch.extend_lens).cumsum(0).to(slots.device) - 1
        if hidden is not None:
            hidden = hidden[last] if sampler is not None else None
        with draft_tp_context(self._worker.parallel_layout):
            state = self._worker.extend_prompt(batch, target, kv_loc_plan)
        self.coverage.wrote(slots)
        self.coverage.end_prompt(rows, ends, target.next_token_ids)
        if sampler is not None:
            if hidden is not None:
                # SGLang keeps no law of the first drafts: their entry runs once more.
                again = [end - 1 for end in ends]
                self.coverage.cover(rows, again)
                ones, tokens = [1] * len(rows), target.next_token_ids.clone()
                self.coverage.keep(rows, again, ones, tokens, hidden, slots[last])
            state = self._blank_state(target.next_token_ids)
        num_tokens = sum(batch.extend_lens)
        self._clock.lap("draft_extend", prompt_load_of(batch), tokens=num_tokens)
        return state

    def _reads(self, batch: Any, plan: RoundPlan) -> bool:
        """What stands for images or given embeddings cannot be caught up on."""
        return (
            plan.reads_prompts
            or not self.coverage.takes_starts
            or batch.input_embeds is not None
            or any(own is not None for own in batch.multimodal_inputs or ())
        )

    def _skip_prompts(
        self, batch: Any, target: Any, rows: list[int]
    ) -> EagleDraftInput:
        self.coverage.skip_prompt(
            rows,
            batch.prefix_lens,
            batch.extend_lens,
            batch.input_ids,
            target.next_token_ids,
            target.logits_output.hidden_states,
            batch.out_cache_loc,
        )
        return self._blank_state(target.next_token_ids)

    def _blank_state(self, bonus_tokens: torch.Tensor) -> EagleDraftInput:
        sampler = self._worker.sampler
        law_size = 0 if sampler is None else sampler.law_size
        return blank_state(bonus_tokens, self._topk, law_size)

    def rows(self, view: RoundView, plan: RoundPlan) -> list[int]:
        """Return the places of the requests that draft in this round."""
        if plan.depth == 0:
            return []
        rows = [
            row
            for row, cap in enumerate(view.caps)
            if cap > 0 and self._can_draft(view, row)
        ]
        if plan.num_drafting is None or len(rows) <= plan.num_drafting:
            return rows
        # Not always the same ones, where only some draft.
        self._turn += 1
        turn = self._turn * plan.num_drafting % len(rows)
        return sorted((rows[turn:] + rows[:turn])[: plan.num_drafting])

    def trees(
        self, batch: Any, view: RoundView, rows: list[int], depth: int
    ) -> DraftTrees:
        """Draft a tree for each of these requests; the others' are empty."""
        bs, self.laws = len(view.caps), None
        if not rows:
            return no_drafts(bs, batch.seq_lens.device)
        with draft_tp_context(self._worker.parallel_layout):
            tokens = self._worker.catch_up(batch, rows)
            self._clock.lap("draft_extend", view.load, tokens=tokens)
            part = batch if len(rows) == bs else rows_of(batch, rows)
            if self._worker.sampler is None:
                trees = self._worker.draft_trees(part, depth)
            else:
                trees, laws = self._worker.draft_chains(part, depth)
                self.laws = laws if part is batch else spread(laws, rows, bs)
        if depth > 1:
            size = len(rows) * self._topk
            self._clock.lap("draft_step", view.load, tokens=size, times=depth - 1)
        return trees if part is batch else spread_trees(trees, rows, bs)

    def after_round(
        self,
        batch: Any,
        done: RoundRecord,
        plan: RoundPlan,
        hidden: torch.Tensor | None,
        slots: torch.Tensor,
    ) -> EagleDraftInput:
        """Return the next round's state; `plan` is that round's.

        hidden  the target's hidden states at the verified rows, or None
        slots   the KV slots of these rows, the followed path's moved to the front
        """
        view, lens = done.view, done.accepted.accept_lens
        emitted = _emitted(done, hidden, slots)
        tokens = emitted.tokens
        last = tokens[lens.cumsum(0) - 1] if done.rows else tokens
        state = self._blank_state(last)
        now = []
        if plan.depth and plan.num_drafting is None:
            now = [row for row in range(len(view.caps)) if self._goes_on(view, row)]
        later = sorted(set(range(len(view.caps))) - set(now))
        for rows, use in ((now, self._extend), (later, self._keep)):
            if not rows:
                continue
            own = emitted
            if len(rows) < len(view.caps):
                mask = torch.zeros(len(view.caps), dtype=torch.bool)
                mask[rows] = True
                mask = mask.to(tokens.device).repeat_interleave(lens.to(torch.int64))
                own = emitted.where(mask)
            own_lens = [done.accept_lens[row] for row in rows]
            use(batch, view, rows, own_lens, own, state)
        return state

    def spoil_unwritten(self, value: float) -> None:
        """Test switch: put `value` where the draft has written nothing, from now on."""
        pool = self._worker.draft_runner.token_to_kv_pool

        def spoil(slots: torch.Tensor) -> None:
            for layer in range(pool.start_layer, pool.start_layer + pool.layer_num):
                pool.get_key_buffer(layer)[slots] = value
                pool.get_value_buffer(layer)[slots] = value

        spoil(self.coverage.unwritten())
        self.coverage.spoil = spoil

    def _can_draft(self, view: RoundView, row: int) -> bool:
        own, seq_len = view.pool_rows[row], view.seq_lens[row]
        return view.settings[row].limit != 0 and self.coverage.can_draft(own, seq_len)

    def _goes_on(self, view: RoundView, row: int) -> bool:
        current = self.coverage.is_current(view.pool_rows[row], view.seq_lens[row])
        return current and self._can_draft(view, row)

    def _extend(
        self,
        batch: Any,
        view: RoundView,
        rows: list[int],
        lens_host: list[int],
        emitted: "_Emitted",
        state: EagleDraftInput,
    ) -> None:
        part = batch if len(rows) == len(view.caps) else rows_of(batch, rows)
        tokens, hidden = emitted.tokens, emitted.hidden
        lens = torch.tensor(lens_host, dtype=torch.int32, device=tokens.device)
        with draft_tp_context(self._worker.parallel_layout):
            fresh = self._worker.extend(part, tokens, lens, lens_host, hidden)
        put_rows(state, rows, fresh)
        self.coverage.cover(
            [view.pool_rows[row] for row in rows],
            [view.seq_lens[r] + n for r, n in zip(rows, lens_host, strict=True)],
        )
        self._clock.lap("draft_extend", view.load, tokens=len(tokens))

    def _keep(
        self,
        batch: Any,
        view: RoundView,
        rows: list[int],
        lens_host: list[int],
        emitted: "_Emitted",
        state: EagleDraftInput,
    ) -> None:
        self.coverage.keep(
            [view.pool_rows[row] for row in rows],
            [view.seq_lens[row] for row in rows],
            lens_host,
            *emitted,
        )


class _Emitted(NamedTuple):
    """Tokens that a round emitted, request by request, with their rows' hidden states.

    slots: of the text's positions that the round has filled, one per token.
    """

    tokens: torch.Tensor
    hidden: torch.Tensor | None
    slots: torch.Tensor

    def where(self, mask: torch.Tensor) -> "_Emitted":
        hidden = None if self.hidden is None else self.hidden[mask]
        return _Emitted(self.tokens[mask], hidden, self.slots[mask])


def _emitted(
    done: RoundRecord, hidden: torch.Tensor | None, slots: torch.Tensor
) -> _Emitted:
    """Pick what was emitted; hidden and slots are of all of the plan's rows."""
    accepted = done.accepted
    if not done.rows:  # a row and a token each
        return _Emitted(accepted.accept_tokens[:, 0], hidden, slots)
    on_path = accepted.accept_index >= 0
    if hidden is not None:
        hidden = hidden[accepted.accept_index[on_path].to(torch.int64)]
    depth = torch.arange(on_path.shape[1], device=slots.device)
    front = (done.plan.qo_indptr[:-1, None] + depth)[on_path].to(torch.int64)
    return _Emitted(accepted.accept_tokens[on_path], hidden, slots[front])
