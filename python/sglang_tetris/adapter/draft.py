"""Drafting: grows one tree per request and keeps each node's probability.

Level 0 holds the topk most likely continuations of the anchor. Each further level runs
the draft over the topk nodes of highest survival of the last level and adds their topk
continuations. A node's accept probability is its probability under the draft given its
parent; survival is the product along the path. With topk 1 the tree is a chain.

    nodes of S steps and topk K:  K + (S - 1) K^2,   draft forwards:  S - 1

Where the draft's KV of a request stands when a round begins (n = committed tokens; the
anchor is token n):

    EAGLE       pairs (hidden i, token i + 1) at positions 0 .. n - 1; the anchor is in
    standalone  tokens 0 .. n: the draft runs unshifted, so that its KV at a position
                depends on no later token, and it sees the very first token

so the first drafted token goes to position n for EAGLE and n + 1 for a standalone draft
(`lead`). Stock SGLang shifts a standalone draft as if it were an EAGLE head.

The draft's attention reads each branch's slots as one line of ancestors. When a branch
continues another branch's node, that line is copied first (`_follow_parents`). Requests
whose draft KV lacks something are caught up before they draft (draft_coverage.py).
"""

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.eagle_info import EagleDraftInput

from sglang_tetris.adapter.draft_coverage import DraftCoverage
from sglang_tetris.adapter.draft_rows import put_rows, rows_of
from sglang_tetris.adapter.sampled_chains import ChainSampler
from sglang_tetris.adapter.slots import flat_slots, restored
from sglang_tetris.adapter.verify_input import TetrisDraftExtendInput
from sglang_tetris.core import DraftTrees


class TreeDrafter:
    """What both kinds of draft share; mixed into SGLang's draft workers.

    State carried from round to round is SGLang's `EagleDraftInput`: `topk_p` and
    `topk_index` `[bs, topk]`, level 0 of the next tree (target ids), `hidden_states`
    `[bs, hidden]` for EAGLE, `bonus_tokens` `[bs]`, the next anchors.
    """

    lead = 0
    coverage: DraftCoverage
    # Set where drafts are drawn instead of being the likeliest tokens.
    sampler: ChainSampler | None = None

    def catch_up(self, batch: Any, rows: list[int]) -> int:
        """Run what these requests lack through the draft, so that they can draft.

        rows are places in the batch. Sets level 0 of their trees in `batch.spec_info`;
        returns the number of tokens that went through.
        """
        lens, pool_rows = batch.seq_lens_cpu.tolist(), batch.req_pool_indices_cpu
        pool_rows = pool_rows.tolist()
        rows = [r for r in rows if not self.coverage.is_current(pool_rows[r], lens[r])]
        if not rows:
            return 0
        lacking = [pool_rows[row] for row in rows]
        seq_lens = [lens[row] for row in rows]
        entries = self.coverage.take(lacking, seq_lens)
        part = rows_of(batch, rows)
        part.seq_lens_cpu = torch.tensor(entries.first, dtype=part.seq_lens_cpu.dtype)
        part.seq_lens = part.seq_lens_cpu.to(batch.seq_lens)
        part.seq_lens_sum = sum(entries.first)
        device = batch.seq_lens.device
        fresh = self.extend(
            part,
            entries.tokens,
            torch.tensor(entries.lens, dtype=torch.int32, device=device),
            entries.lens,
            entries.hidden,
        )
        put_rows(batch.spec_info, rows, fresh)
        self.coverage.cover(lacking, seq_lens)
        return sum(entries.lens)

    def draft_trees(self, batch: Any, depth: int) -> DraftTrees:
        """Draft a tree of `depth` levels per request, from `batch.spec_info`."""
        state: EagleDraftInput = batch.spec_info
        probs, tokens = state.topk_p, state.topk_index
        bs, topk = tokens.shape
        level_parents = torch.full_like(tokens, -1)
        token_levels, prob_levels = [tokens], [probs]
        parent_levels = [level_parents]
        if depth > 1:
            with restored(batch):
                forward_batch, slots = self._begin(batch, state)
                frontier = torch.arange(topk, device=tokens.device).expand(bs, topk)
                survival, hidden, begin = probs, state.hidden_states, 0
                if hidden is not None:
                    hidden = hidden.repeat_interleave(topk, dim=0)
                for step in range(depth - 1):
                    chosen = token_levels[-1].gather(1, frontier)
                    logits, hidden = self._forward_step(
                        forward_batch, step, chosen.flatten(), slots[step], hidden
                    )
                    probs, tokens = self._most_likely(logits)
                    parents = (begin + frontier).repeat_interleave(topk, dim=1)
                    begin += token_levels[-1].shape[1]
                    token_levels.append(tokens.view(bs, topk * topk))
                    prob_levels.append(probs.view(bs, topk * topk))
                    parent_levels.append(parents)
                    scores = survival.repeat_interleave(topk, 1) * prob_levels[-1]
                    survival, frontier = scores.topk(topk, dim=1)
                    if topk > 1 and step < depth - 2:
                        branch = frontier // topk
                        self._follow_parents(branch, slots, step)
                        if hidden is not None:
                            rows = (
                                torch.arange(bs, device=branch.device)[:, None] * topk
                            )
                            hidden = hidden[(rows + branch).flatten()]
        return DraftTrees(
            tokens=torch.cat(token_levels, 1),
            parents=torch.cat(parent_levels, 1),
            accept_probs=torch.cat(prob_levels, 1),
            num_nodes=torch.full(
                (bs,), sum(t.shape[1] for t in token_levels), device=tokens.device
            ),
            max_depth=depth,
        )

    def draft_chains(self, batch: Any, depth: int) -> tuple[DraftTrees, torch.Tensor]:
        """Draw a chain of `depth` tokens per request; return it and the laws.

        The laws `[bs, depth, Vd]` are those that the tokens were drawn from.
        """
        state: EagleDraftInput = batch.spec_info
        sampler = self.sampler
        assert sampler is not None
        laws = [state.draft_probs]
        tokens = [sampler.draw(state.draft_probs)]
        if depth > 1:
            info = batch.sampling_info
            with restored(batch):
                forward_batch, slots = self._begin(batch, state)
                hidden = state.hidden_states
                for step in range(depth - 1):
                    logits, hidden = self._forward_step(
                        forward_batch, step, tokens[-1], slots[step], hidden
                    )
                    laws.append(sampler.law(logits, info))
                    tokens.append(sampler.draw(laws[-1]))
        return sampler.chains(tokens, laws), torch.stack(laws, 1)

    def _begin(self, batch: Any, state: Any) -> tuple[ForwardBatch, torch.Tensor]:
        """Set up the multi-step decode; return it and `[steps, bs * topk]` slots."""
        bs, topk = state.topk_index.shape
        steps = self.speculative_num_steps
        advance(batch, self.lead)
        places = torch.arange(topk * steps, device=batch.seq_lens.device)
        columns = batch.seq_lens[:, None] + places
        rows = self.req_to_token_pool.req_to_token[batch.req_pool_indices.long()]
        slots = rows.gather(1, columns).to(torch.int64)
        batch.out_cache_loc = slots.flatten()
        batch.spec_info = state
        state.num_tokens_per_req = state.num_tokens_for_logprob_per_req = topk
        state.positions = batch.seq_lens.repeat_interleave(topk)
        forward_batch = ForwardBatch.init_new(
            batch,
            self.draft_runner,
            capture_hidden_mode=self.step_capture_mode,
            return_hidden_states_before_norm=False,
        )
        forward_batch.return_logprob = False
        self.draft_attn_backend.init_forward_metadata(forward_batch)
        forward_batch.mark_forward_metadata_ready()
        by_step = slots.view(bs, topk, steps).permute(2, 0, 1).reshape(steps, -1)
        return forward_batch, by_step

    def _forward_step(
        self,
        forward_batch: ForwardBatch,
        step: int,
        input_ids: torch.Tensor,
        slots: torch.Tensor,
        hidden: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the step's draft logits and hidden states, a row per input."""
        forward_batch.input_ids = input_ids
        forward_batch.out_cache_loc = slots
        forward_batch.spec_info.hidden_states = hidden
        context = ForwardContext(
            attn_backend=self.draft_attn_backend.attn_backends[step]
        )
        with forward_context(context, forward_batch=forward_batch):
            out = self.draft_runner.forward(forward_batch).logits_output
        forward_batch.positions.add_(1)
        if self.draft_runner.model_config.model_is_mrope:
            forward_batch.mrope_positions.add_(1)
        return out.next_token_logits, out.hidden_states

    def _most_likely(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return probabilities and target ids of the topk tokens, `[rows, topk]`."""
        logits = logits.float()
        top, index = logits.topk(self.topk, dim=-1)
        probs = torch.exp(top - logits.logsumexp(-1, keepdim=True)).clamp_(max=1.0)
        # A draft that yields NaN proposes nothing worth verifying.
        probs = torch.nan_to_num(probs, nan=0.0)
        if self.hot_token_id is not None:
            index = self.hot_token_id[index]
        return probs, index

    def _follow_parents(
        self, branch: torch.Tensor, slots: torch.Tensor, step: int
    ) -> None:
        """Copy each branch's draft KV of steps 0 .. step from the branch it continues.

        branch [bs, topk]: the branch each new one continues; slots [steps, bs * topk].
        """
        bs, topk = branch.shape
        line = slots[: step + 1].view(step + 1, bs, topk)
        source = line.gather(2, branch.expand(step + 1, bs, topk)).flatten()
        target = line.flatten()
        pool = self.draft_runner.token_to_kv_pool
        for layer in range(pool.start_layer, pool.start_layer + pool.layer_num):
            for buffer in (pool.get_key_buffer(layer), pool.get_value_buffer(layer)):
                # Indexing gathers before it writes, so overlapping moves are safe.
                buffer[target] = buffer[source]

    def extend(
        self,
        batch: Any,
        tokens: torch.Tensor,
        lens: torch.Tensor,
        lens_host: list[int],
        hidden: torch.Tensor | None,
    ) -> EagleDraftInput:
        """Run the draft over new tokens; return the next round's state.

        tokens  [sum(lens)] int64, each request's tokens, its bonus token last
        lens    [bs] int32, how many each (>= 1); lens_host the same for the host
        hidden  [sum(lens), hidden], the target's at the rows that chose them, or None

        Leaves `batch` as it was. The first token goes to position seq_lens + lead.
        """
        last = lens.cumsum(0) - 1
        with restored(batch):
            advance(batch, self.lead)
            prefix = batch.seq_lens_cpu.tolist()
            batch.out_cache_loc = flat_slots(
                self.req_to_token_pool, batch.req_pool_indices, batch.seq_lens, lens
            )
            batch.spec_info = TetrisDraftExtendInput(
                hidden_states=hidden,
                num_correct_drafts=lens - 1,
                num_accept_tokens=lens,
                num_accept_tokens_cpu=lens_host,
                num_tokens_per_req=max(lens_host),
                num_tokens_for_logprob_per_req=1,
                select_index=last.to(torch.int64),
                extend_indptr=torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int(),
            )
            batch.input_ids = tokens
            batch.prefix_lens, batch.extend_lens = prefix, lens_host
            batch.extend_num_tokens = sum(lens_host)
            batch.forward_mode = ForwardMode.DRAFT_EXTEND_V2
            forward_batch = ForwardBatch.init_new(
                batch,
                self.draft_runner,
                capture_hidden_mode=self.step_capture_mode,
                return_hidden_states_before_norm=False,
            )
            forward_batch.return_logprob = False
            # The forward reads what it writes: lengths count the new rows.
            forward_batch.seq_lens = forward_batch.seq_lens + lens
            forward_batch.seq_lens_cpu = forward_batch.seq_lens_cpu + torch.tensor(
                lens_host, dtype=forward_batch.seq_lens_cpu.dtype
            )
            forward_batch.seq_lens_sum = int(forward_batch.seq_lens_cpu.sum())
            self.draft_runner.attn_backend.init_forward_metadata(forward_batch)
            forward_batch.mark_forward_metadata_ready()
            out = self.draft_runner.forward(forward_batch).logits_output
            self.coverage.wrote(batch.out_cache_loc)
        probs, index = self._most_likely(out.next_token_logits)
        law = None
        if self.sampler is not None:
            law = self.sampler.law(out.next_token_logits, batch.sampling_info)
        return EagleDraftInput(
            topk_p=probs,
            topk_index=index,
            draft_probs=law,
            hidden_states=out.hidden_states,
            bonus_tokens=tokens[last],
        )


def advance(batch: Any, tokens: int) -> None:
    """Count `tokens` more for every request of the batch, in its own fields."""
    if tokens:
        batch.seq_lens = batch.seq_lens + tokens
        batch.seq_lens_cpu = batch.seq_lens_cpu + tokens
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
