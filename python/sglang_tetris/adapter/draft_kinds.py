"""The two kinds of draft: an EAGLE head beside the target, a model of its own.

What they share, and where each one's KV stands, is in `draft.py`.
"""

import copy
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
)
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker

from sglang_tetris.adapter.draft import TreeDrafter
from sglang_tetris.adapter.draft_rows import blank_state
from sglang_tetris.adapter.slots import restored


class EagleTreeDrafter(TreeDrafter, EagleDraftWorker):
    """An EAGLE or EAGLE3 head: reads the target's hidden states, runs shifted."""

    # Which of its hidden states the target returns, and each draft step.
    target_capture_mode = CaptureHiddenMode.FULL
    step_capture_mode = CaptureHiddenMode.LAST

    def extend_prompt(
        self, batch: Any, target: Any, kv_loc_plan: Any
    ) -> EagleDraftInput:
        """Run the head over the prompt part that the target has just processed."""
        state = self._draft_extend_for_prefill(
            batch,
            target.logits_output.hidden_states,
            target.next_token_ids,
            target.logits_output.mm_input_embeds,
            kv_loc_plan=kv_loc_plan,
        )
        if self.hot_token_id is not None:
            state.topk_index = self.hot_token_id[state.topk_index]
        return state


class StandaloneTreeDrafter(TreeDrafter, StandaloneDraftWorker):
    """A draft model of its own: runs unshifted over the same tokens as the target."""

    lead = 1
    target_capture_mode = CaptureHiddenMode.NULL
    step_capture_mode = CaptureHiddenMode.NULL

    def init_lm_head(self) -> None:
        """Keep only the hot tokens' rows of the draft's own head, given a map."""
        super().init_lm_head()
        if self.hot_token_id is not None:
            head = self.draft_runner.model.lm_head
            self.hot_token_id = self.hot_token_id.to(head.weight.device)
            rows = head.weight.data[self.hot_token_id].clone()
            # A tied head is the embedding itself, which must stay whole.
            head = copy.copy(head)
            head._parameters = dict(head._parameters)
            head.weight = torch.nn.Parameter(rows, requires_grad=False)
            self.draft_runner.model.lm_head = head

    def extend_prompt(
        self, batch: Any, target: Any, kv_loc_plan: Any
    ) -> EagleDraftInput:
        """Run the draft over the same prompt part as the target.

        The first anchor has no slot yet: the draft catches up on it when it drafts.
        """
        with restored(batch):
            forward_batch = ForwardBatch.init_new(
                batch,
                self.draft_runner,
                capture_hidden_mode=CaptureHiddenMode.NULL,
                return_hidden_states_before_norm=False,
                kv_loc_plan=kv_loc_plan,
            )
            forward_batch.return_logprob = False
            self.draft_runner.forward(forward_batch)
        return blank_state(target.next_token_ids, self.topk)
