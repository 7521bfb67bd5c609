"""The worker: SGLang calls it once per step, and a decode step is one TETRIS round.

    draft a tree per request  ->  keep the drafts of the whole batch most likely to be
    accepted, as many as the budget affords  ->  verify them with the target, ragged
    ->  follow the target's own tokens  ->  commit KV and hidden states  ->  run the
    draft over what was emitted

Prompt steps are SGLang's own, plus the draft's pass over the prompt.

Source of the round: TETRIS (arXiv 2502.15197), section 3; worker interface: SGLang's
speculative/eagle_worker_v2.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.managers.scheduler_components.output_streamer import (
    SchedulerOutputStreamer,
)
from sglang.srt.runtime_context import (
    get_device,
    get_parallel,
    get_schedule,
    get_spec,
)
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_tetris.adapter import options, reserve
from sglang_tetris.adapter.allocation import allocate, verify_plan
from sglang_tetris.adapter.calibration import RoundCalibration
from sglang_tetris.adapter.commit import add_logprobs, commit_kv
from sglang_tetris.adapter.cost_file import read_cost_table
from sglang_tetris.adapter.draft_coverage import make_coverage
from sglang_tetris.adapter.draft_kinds import EagleTreeDrafter, StandaloneTreeDrafter
from sglang_tetris.adapter.drafting import Drafting
from sglang_tetris.adapter.memory import draft_memory
from sglang_tetris.adapter.penalties import PenaltyState
from sglang_tetris.adapter.rank_agreement import RankAgreement
from sglang_tetris.adapter.rejection_sampling import make_rejection
from sglang_tetris.adapter.reporting import RoundReporter
from sglang_tetris.adapter.round_clock import DeviceClock, RoundClock
from sglang_tetris.adapter.round_planner import RoundPlanner
from sglang_tetris.adapter.round_record import RoundRecord
from sglang_tetris.adapter.round_view import RoundView, prompt_load_of, view_of
from sglang_tetris.adapter.sampling import MatchSampler
from sglang_tetris.adapter.service_levels import ServiceLevels
from sglang_tetris.adapter.target_forward import TargetForward
from sglang_tetris.adapter.trace import open_trace
from sglang_tetris.core import AcceptResult, VerifyPlan
from sglang_tetris.core.config import BudgetSpec


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
        self._high_first = not get_schedule().schedule_low_priority_values_first
        path = self.config.cost_table
        self._cost_table = None if path is None else read_cost_table(path)
        self._agreement = RankAgreement(get_parallel().tp_group)
        self._levels = ServiceLevels(self._agreement)
        self.planner = self.make_planner(self.config.budget)
        self.reporter = RoundReporter()
        self._clock = RoundClock() if self.device == "cpu" else DeviceClock()
        self._penalties = PenaltyState(runner.model_config.vocab_size, self.device)
        self._sampler = MatchSampler(runner.sampler, self._penalties)
        self._calibration = self._make_calibration()
        self._trace = None
        self._target = TargetForward(
            target_worker,
            num_steps=self.speculative_num_steps,
            topk=self.topk,
            capture_mode=self._capture_mode,
        )

    def init_cuda_graphs(self) -> None:
        """Last step of SGLang's start-up: compile what the first request would."""
        super().init_cuda_graphs()
        from sglang_tetris.adapter.warm_up import warm_up

        self._drafting = Drafting(
            self._draft_worker,
            make_coverage(self._draft_worker, self.config.kept_tokens),
            self._clock,
        )
        if self.config.verify == "rejection":
            self._rejection = make_rejection(
                self.config, self._draft_worker, self._penalties
            )
        warm_up(self, self.config.budget)
        # What was learnt from made-up prompts is no use.
        self._clock.take()
        self._calibration = self._make_calibration()
        if self._agreement.decides:
            self._trace = open_trace(self.config, self.speculative_num_steps, self.topk)
        self._draft_memory = draft_memory(
            self._target_worker.model_runner,
            self._draft_worker.draft_runner,
            self._drafting.coverage.kept_bytes,
        )

    def make_planner(self, budget: BudgetSpec) -> RoundPlanner:
        """Return a planner that starts from the server's configuration."""
        return RoundPlanner(
            budget,
            num_steps=self.speculative_num_steps,
            topk=self.topk,
            agreement=self._agreement,
            cost_table=self._cost_table,
            draft_always=self.config.draft_always,
            lagged=self.config.verify == "rejection",
            # Only the CPU device's attention can start after what was not read.
            always_reads=self.device != "cpu",
        )

    def _make_calibration(self) -> RoundCalibration:
        agreed = self._agreement
        return RoundCalibration(self.config, saves=agreed.decides, share=agreed.text)

    @property
    def max_drafts(self) -> int:
        """Draft tokens a request can have verified in one round."""
        return self.speculative_num_draft_tokens - 1

    def describe(self) -> dict[str, Any]:
        """Return the effective configuration and the totals, for /server_info."""
        chosen = options.current()
        return {
            "draft": chosen.draft_kind,
            "draft_budget": str(self.planner),
            "plan": self.planner.describe(),
            "verify": chosen.tetris_verify,
            "num_steps": self.speculative_num_steps,
            "topk": self.topk,
            "max_drafts": self.max_drafts,
            "draft_memory": self._draft_memory,
            "calibration": self._calibration.describe(),
            "totals": self.reporter.describe(),
        }

    def test_switches(self) -> dict[str, Callable[[Any], None]]:
        """Return faults that tests plant, to see that they would find them."""
        bias = self._sampler.plant_argmax
        if self.config.verify == "rejection":
            bias = self._rejection.plant_bias
        return {
            "tetris_test_keep_argmax": bias,
            "tetris_test_spoil_draft_kv": self._drafting.spoil_unwritten,
        }

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
        load, num_tokens = prompt_load_of(batch), sum(batch.extend_lens)
        self._clock.start_prompts()
        result = self.target_worker.forward_batch_generation(
            batch, capture_hidden_mode=self._capture_mode, return_kv_loc_plan=True
        )
        self._clock.lap("prompt", load, tokens=num_tokens)
        kv_loc_plan, result.kv_loc_plan = result.kv_loc_plan, None
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = self._drafting.prompt_step(
            batch, result, kv_loc_plan, self.planner.plan
        )
        return result

    def _round(self, batch: Any) -> GenerationBatchResult:
        """One round over the batch's running requests (arXiv 2502.15197, section 3)."""
        self._clock.start()
        view = view_of(
            batch, self.config, high_first=self._high_first, most=self.max_drafts
        )
        decided = self.planner.plan
        if decided.depth and not reserve.holds_drafts():
            raise RuntimeError("a round with drafts was planned after slots for none")
        rows = self._drafting.rows(view, decided)
        drafted = self._drafting.trees(batch, view, rows, decided.depth)
        trees = self._calibration.calibrated(drafted, view)
        draft_budget, allocation = allocate(
            trees, view, batch.reqs, self.planner, self._levels, self.config.min_drafts
        )
        plan = verify_plan(trees, allocation, batch)
        target, slots = self._run_target(batch, plan, view, drafted=bool(rows))
        accepted, cut_short = self._accept(batch, plan, target, view)
        commit_kv(self.token_to_kv_pool_allocator.get_kvcache(), plan, slots, accepted)
        done = RoundRecord(
            reqs=batch.reqs,
            view=view,
            decided=decided,
            rows=rows,
            drafted=drafted,
            trees=trees,
            draft_budget=draft_budget,
            allocation=allocation,
            plan=plan,
            accepted=accepted,
            accept_lens=accepted.accept_lens.tolist(),
            cut_short=cut_short,
        )
        self._learn(done)
        self.planner.next_round(view.load)
        state = self._drafting.after_round(
            batch, done, self.planner.plan, target.hidden_states, slots
        )
        target.hidden_states = None
        self._clock.end(view.load)
        return GenerationBatchResult(
            logits_output=target,
            next_token_ids=accepted.accept_tokens.clamp(min=0).flatten(),
            accept_lens=accepted.accept_lens,
            cap_lens=allocation.verify_lens,
            speculative_num_draft_tokens=accepted.accept_tokens.shape[1],
            new_seq_lens=batch.seq_lens + accepted.accept_lens,
            next_draft_input=state,
        )

    def _run_target(
        self, batch: Any, plan: VerifyPlan, view: RoundView, *, drafted: bool
    ) -> tuple[Any, torch.Tensor]:
        run = self._target.verify if drafted else self._target.decode
        output = run(batch, plan)
        rows = plan.input_ids.shape[0]
        self._clock.lap("verify" if drafted else "decode", view.load, tokens=rows)
        return output

    def _accept(
        self, batch: Any, plan: VerifyPlan, target: Any, view: RoundView
    ) -> tuple[AcceptResult, list[int]]:
        """Return what is emitted, and the requests whose walk a grammar cut short."""
        arguments = (plan, target.next_token_logits, batch.sampling_info, batch.reqs)
        keep, laws = batch.return_logprob, self._drafting.laws
        if laws is None or batch.sampling_info.is_all_greedy:
            found = self._sampler.accept(*arguments, keep_logits=keep)
        else:
            found = self._rejection.accept(*arguments, laws, keep_logits=keep)
        accepted = found[0]
        if batch.return_logprob:
            add_logprobs(batch, target, plan, accepted)
        sampled = plan.input_ids.shape[0]
        if view.load.sampling != "greedy":
            sampled = int(accepted.accept_lens.sum())
        self._clock.lap(f"sample_{view.load.sampling}", view.load, tokens=sampled)
        return found

    def _learn(self, done: RoundRecord) -> None:
        laps = self._clock.take()
        self._calibration.learn(done)
        self.planner.observe(done, laps)
        if self._trace is not None:
            self._trace.record_round_host(done, laps)
        self.reporter.record_round_host(done, self.planner)
        self._clock.skip()
