"""The target's forward of a round: ragged verify rows, or one plain row per request."""

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sglang_tetris.adapter.slots import flat_slots, restored
from sglang_tetris.adapter.verify_input import TetrisVerifyInput
from sglang_tetris.core import VerifyPlan


class TargetForward:
    """Runs the target over a plan's rows and returns its output and their KV slots.

    capture_mode: which hidden states the draft needs of the target.
    """

    def __init__(
        self, target_worker: Any, *, num_steps: int, topk: int, capture_mode: Any
    ) -> None:
        self._worker = target_worker
        self._num_steps, self._topk = num_steps, topk
        self._capture_mode = capture_mode

    def verify(self, batch: Any, plan: VerifyPlan) -> tuple[Any, torch.Tensor]:
        """Run all rows of the plan, trees and anchors."""
        pool = self._worker.model_runner.req_to_token_pool
        slots = flat_slots(
            pool, batch.req_pool_indices, batch.seq_lens, plan.verify_lens
        )
        with restored(batch):
            batch.spec_info = TetrisVerifyInput.from_plan(
                plan,
                num_steps=self._num_steps,
                topk=self._topk,
                capture_hidden_mode=self._capture_mode,
            )
            batch.spec_info.seq_lens_cpu = batch.seq_lens_cpu
            batch.spec_info.seq_lens_sum = int(batch.seq_lens_cpu.sum())
            batch.input_ids = plan.input_ids
            batch.forward_mode = ForwardMode.TARGET_VERIFY
            return self._run(batch, slots), slots

    def decode(self, batch: Any, plan: VerifyPlan) -> tuple[Any, torch.Tensor]:
        """Run a plan that has anchors only, as plain decoding runs them."""
        pool = self._worker.model_runner.req_to_token_pool
        slots = pool.req_to_token[batch.req_pool_indices, batch.seq_lens]
        slots = slots.to(torch.int64)
        with restored(batch):
            batch.spec_info = None
            batch.input_ids = plan.input_ids
            batch.forward_mode = ForwardMode.DECODE
            # Plain decoding counts the row it is about to write.
            batch.seq_lens = batch.seq_lens + 1
            batch.seq_lens_cpu = batch.seq_lens_cpu + 1
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
            if batch.orig_seq_lens is not None:
                batch.orig_seq_lens = batch.orig_seq_lens + 1
            return self._run(batch, slots), slots

    def _run(self, batch: Any, slots: torch.Tensor) -> Any:
        batch.out_cache_loc = slots
        forward_batch = ForwardBatch.init_new(
            batch,
            self._worker.model_runner,
            capture_hidden_mode=self._capture_mode,
            return_hidden_states_before_norm=False,
        )
        output = self._worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True
        )
        return output.logits_output
