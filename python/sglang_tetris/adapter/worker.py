"""The worker: SGLang calls it once per step, and a decode step is one TETRIS round.

    draft a tree per request  ->  keep the drafts of the whole batch most likely to be
    accepted, as many as the budget affords  ->  verify them with the target, ragged
    ->  follow the target's own tokens  ->  commit KV and hidden states  ->  run the
    draft over what was emitted

Prompt steps are SGLang's own, plus the draft's pass over the prompt.

Source of the round: TETRIS (arXiv 2502.15197), section 3; worker interface: SGLang's
speculative/eagle_worker_v2.py.
"""

from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.managers.scheduler_components.output_streamer import (
    SchedulerOutputStreamer,
)
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_device, get_schedule, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_tp_context

from sglang_tetris.adapter import options
from sglang_tetris.adapter.budgets import BudgetHolder, draft_caps_host, own_limit
from sglang_tetris.adapter.draft import no_drafts
from sglang_tetris.adapter.draft_kinds import EagleTreeDrafter, StandaloneTreeDrafter
from sglang_tetris.adapter.memory import draft_memory
from sglang_tetris.adapter.penalties import PenaltyState
from sglang_tetris.adapter.reporting import RoundReporter
from sglang_tetris.adapter.sampling import MatchSampler
from sglang_tetris.adapter.slots import flat_slots, restored
from sglang_tetris.adapter.verify_input import TetrisVerifyInput
from sglang_tetris.core import (
    AcceptResult,
    Allocation,
    DraftTrees,
    VerifyPlan,
    count_round,
)
from sglang_tetris.kernels import build_verify_plan, select_draft_tokens


class TetrisWorker(EAGLEWorkerV2):
    """Drives the target and the draft; one per scheduler."""

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any
    ) -> None:
        BaseSpecWorker.__init__(self)
        spec = get_spec()
        self.server_args = server_args
        self.gpu_id = gpu_id
        self.device = get_device().device
        self.page_size = get_schedule().page_size
        self.topk = spec.speculative_eagle_topk
        self.speculative_num_steps = spec.speculative_num_steps
        self.speculative_num_draft_tokens = spec.speculative_num_draft_tokens
        self.speculative_algorithm = SpeculativeAlgorithm.from_string(
            spec.speculative_algorithm
        )
        self._target_worker = target_worker
        self._hosts_draft = True
        self.enable_dp_spec_prefill_coordination = False
        self.adaptive_controller = None

        standalone = self.speculative_algorithm.is_standalone()
        drafter = StandaloneTreeDrafter if standalone else EagleTreeDrafter
        self._draft_worker = drafter(server_args, gpu_id, nccl_port, target_worker)
        self._capture_mode = drafter.target_capture_mode
        # Ask the streamer, made after the worker, for our entry in meta_info.
        SchedulerOutputStreamer.has_additional_customized_info = True
        runner = target_worker.model_runner
        self.config = options.current().parsed()
        self.budget = BudgetHolder(self.config.budget)
        self.reporter = RoundReporter()
        self._sampler = MatchSampler(
            runner.sampler, PenaltyState(runner.model_config.vocab_size, self.device)
        )

    def init_cuda_graphs(self) -> None:
        """Last step of SGLang's start-up: compile what the first request would."""
        super().init_cuda_graphs()
        from sglang_tetris.adapter.warm_up import warm_up

        warm_up(self)
        self._draft_memory = draft_memory(
            self._target_worker.model_runner, self._draft_worker.draft_runner
        )

    @property
    def max_drafts(self) -> int:
        """Draft tokens a request can have verified in one round."""
        return self.speculative_num_draft_tokens - 1

    def describe(self) -> dict[str, Any]:
        """Return the effective configuration and the totals, for /server_info."""
        chosen = options.current()
        return {
            "draft": chosen.draft_kind,
            "draft_budget": str(self.budget),
            "verify": chosen.tetris_verify,
            "num_steps": self.speculative_num_steps,
            "topk": self.topk,
            "max_drafts": self.max_drafts,
            "draft_memory": self._draft_memory,
            "totals": self.reporter.describe(),
        }

    def keep_argmax(self, on: bool) -> None:
        """Test switch: emit the arg-max at verified rows, which biases the output."""
        self._sampler.keep_argmax = on

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Any = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """Run one step of the scheduler: a prompt step or a round."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            result = self._prompt_step(batch)
        elif batch.forward_mode.is_idle():
            raise RuntimeError("TETRIS runs no idle batches: DP attention is refused")
        else:
            result = self._round(batch)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        return result

    def _prompt_step(self, batch: Any) -> GenerationBatchResult:
        result = self.target_worker.forward_batch_generation(
            batch, capture_hidden_mode=self._capture_mode, return_kv_loc_plan=True
        )
        kv_loc_plan, result.kv_loc_plan = result.kv_loc_plan, None
        result.new_seq_lens = batch.seq_lens
        with draft_tp_context(self._draft_worker.parallel_layout):
            result.next_draft_input = self._draft_worker.extend_prompt(
                batch, result, kv_loc_plan
            )
        return result

    def _round(self, batch: Any) -> GenerationBatchResult:
        """One round over the batch's running requests (arXiv 2502.15197, section 3)."""
        limits = [own_limit(req, self.config) for req in batch.reqs]
        caps = draft_caps_host(batch.reqs, limits, self.max_drafts)
        trees = self._draft(batch, caps)
        draft_budget = self.budget.draft_budget(trees)
        allocation = select_draft_tokens(
            trees,
            draft_budget=draft_budget,
            max_drafts=torch.tensor(caps, dtype=torch.int64, device=self.device),
        )
        plan = build_verify_plan(
            trees,
            allocation,
            anchors=batch.spec_info.bonus_tokens.to(torch.int64),
            prefix_lens=batch.seq_lens.to(torch.int64),
        )
        target, slots = self._verify(batch, plan)
        accepted = self._accept(batch, plan, target)
        self._commit_kv(plan, slots, accepted)
        state = self._draft_extend(batch, accepted, target.hidden_states)
        target.hidden_states = None
        self._report_host(
            batch, draft_budget, limits, trees, caps, allocation, accepted
        )
        return GenerationBatchResult(
            logits_output=target,
            next_token_ids=accepted.accept_tokens.clamp(min=0).flatten(),
            accept_lens=accepted.accept_lens,
            cap_lens=allocation.verify_lens,
            speculative_num_draft_tokens=accepted.accept_tokens.shape[1],
            new_seq_lens=batch.seq_lens + accepted.accept_lens,
            next_draft_input=state,
        )

    def _draft(self, batch: Any, caps: list[int]) -> DraftTrees:
        """Draft a tree per request, or none where nothing could be verified."""
        bs = len(batch.reqs)
        if not any(caps) or self.budget.is_zero():
            return no_drafts(bs, self.device)
        with draft_tp_context(self._draft_worker.parallel_layout):
            self._draft_worker.complete_state(batch)
            return self._draft_worker.draft_trees(batch)

    def _verify(self, batch: Any, plan: VerifyPlan) -> tuple[Any, torch.Tensor]:
        """Run the target over the plan's rows; return its output and their slots."""
        slots = flat_slots(
            self.req_to_token_pool,
            batch.req_pool_indices,
            batch.seq_lens,
            plan.verify_lens,
        )
        with restored(batch):
            batch.spec_info = TetrisVerifyInput.from_plan(
                plan,
                num_steps=self.speculative_num_steps,
                topk=self.topk,
                capture_hidden_mode=self._capture_mode,
            )
            batch.spec_info.seq_lens_cpu = batch.seq_lens_cpu
            batch.spec_info.seq_lens_sum = int(batch.seq_lens_cpu.sum())
            batch.input_ids = plan.input_ids
            batch.out_cache_loc = slots
            batch.forward_mode = ForwardMode.TARGET_VERIFY
            forward_batch = ForwardBatch.init_new(
                batch,
                self.target_worker.model_runner,
                capture_hidden_mode=self._capture_mode,
                return_hidden_states_before_norm=False,
            )
            output = self.target_worker.forward_batch_generation(
                batch=None, forward_batch=forward_batch, is_verify=True
            )
        return output.logits_output, slots

    def _accept(self, batch: Any, plan: VerifyPlan, target: Any) -> AcceptResult:
        logits = target.next_token_logits
        accepted = self._sampler.accept(
            plan,
            logits,
            batch.sampling_info,
            batch.reqs,
            keep_logits=batch.return_logprob,
        )
        if batch.return_logprob:
            emitted = torch.zeros_like(plan.input_ids)
            on_path = accepted.accept_index >= 0
            rows = accepted.accept_index[on_path].to(torch.int64)
            emitted[rows] = accepted.accept_tokens[on_path]
            compute_spec_logprobs(
                batch, target, emitted, accept_index=accepted.accept_index
            )
        return accepted

    def _commit_kv(
        self, plan: VerifyPlan, slots: torch.Tensor, accepted: AcceptResult
    ) -> None:
        """Move the followed path's KV to the slots right after the committed tokens."""
        on_path = accepted.accept_index >= 0
        rows = accepted.accept_index[on_path].to(torch.int64)
        depth = torch.arange(on_path.shape[1], device=rows.device)
        front = (plan.qo_indptr[:-1, None] + depth)[on_path].to(torch.int64)
        moved = front != rows
        if bool(moved.any()):
            pool = self.token_to_kv_pool_allocator.get_kvcache()
            pool.move_kv_cache(slots[front[moved]], slots[rows[moved]])

    def _draft_extend(
        self, batch: Any, accepted: AcceptResult, hidden: torch.Tensor | None
    ) -> EagleDraftInput:
        on_path = accepted.accept_index >= 0
        if hidden is not None:
            hidden = hidden[accepted.accept_index[on_path].to(torch.int64)]
        with draft_tp_context(self._draft_worker.parallel_layout):
            # A round without drafts may leave first anchors pending.
            self._draft_worker.complete_state(batch)
            return self._draft_worker.extend_accepted(
                batch,
                accepted.accept_tokens[on_path],
                accepted.accept_lens,
                accepted.accept_lens.tolist(),
                hidden,
            )

    def _report_host(
        self,
        batch: Any,
        draft_budget: int,
        limits: list[int | None],
        trees: DraftTrees,
        caps: list[int],
        allocation: Allocation,
        accepted: AcceptResult,
    ) -> None:
        nodes = zip(trees.num_nodes.tolist(), caps, strict=True)
        self.reporter.record_round_host(
            batch.reqs,
            str(self.budget),
            draft_budget,
            limits,
            count_round(
                num_nodes=[min(drafted, cap) for drafted, cap in nodes],
                verify_lens=allocation.verify_lens.tolist(),
                accept_lens=accepted.accept_lens.tolist(),
            ),
        )
