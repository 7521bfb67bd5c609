"""Runs at start-up what the first request would otherwise wait for.

Covers the compiled functions of the core, every kind of sampling (greedy, multinomial,
top-k / top-p / min-p, seeded, penalties, bias), and whole steps: a prompt step and a
round with drafts, through the same worker methods as a request's. SGLang's own warm-up
request cannot do the last: an `Engine` sends none, and a budget of 0 drafts nothing.
"""

import logging
import time
from array import array
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.runtime_context import get_exec, get_model
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_tetris import core
from sglang_tetris.adapter.reporting import RoundReporter
from sglang_tetris.core.config import BudgetSpec

logger = logging.getLogger(__name__)

# One row and several: the two shapes a shape-specialising compiler tells apart.
_BATCH_SIZES = (1, 2, 5)
_PROMPT_LEN = 4


def warm_up(worker: Any, configured: BudgetSpec) -> None:
    """Compile and run, for one row and for several, all that requests will need."""
    begin = time.perf_counter()
    core.warm_up()
    _warm_up_samplers(worker.target_worker.model_runner, worker.device)
    # Whatever the budget is now: it can be changed while the server runs.
    for budget in (BudgetSpec("fixed", 0), BudgetSpec("mean", 2)):
        worker.planner = worker.make_planner(budget)
        sizes = [rows for rows in _BATCH_SIZES if _warm_up_steps(worker, rows)]
    logger.info(
        "TETRIS: warmed up in %.1f s: samplers, steps of %s requests with %d drafts.",
        time.perf_counter() - begin,
        ", ".join(map(str, sizes)) or "no",
        worker.reporter.totals.num_verify_drafts,
    )
    # The users' own budget, and nothing counted yet.
    worker.planner, worker.reporter = worker.make_planner(configured), RoundReporter()


def _warm_up_steps(worker: Any, rows: int) -> bool:
    """Run a prompt step and a round on slots that are given back; False if it cannot.

    That is where the pools are too small, or the weights still arrive in the
    background. Nothing else may hold a slot yet.
    """
    pool, allocator = worker.target_worker.get_memory_pool()
    slots = _PROMPT_LEN + get_alloc_reserve_per_decode() + 2 * worker.page_size
    fits = rows <= pool.size and rows * slots <= allocator.available_size()
    if not fits or get_model().is_startup_weight_load_overlap:
        return False
    batch = _prompts(worker, pool, allocator, rows)
    try:
        batch.prepare_for_extend()
        batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
        batch.spec_info = worker.forward_batch_generation(batch).next_draft_input
        batch.prepare_for_decode()
        worker.forward_batch_generation(batch)
    finally:
        pool.clear()
        allocator.clear()
    return True


def _prompts(worker: Any, pool: Any, allocator: Any, rows: int) -> ScheduleBatch:
    params = SamplingParams(temperature=0, max_new_tokens=2 * worker.max_drafts + 2)
    params.normalize(None)
    model_config = worker.target_worker.model_runner.model_config
    reqs = []
    for row in range(rows):
        req = Req(f"warm-up-{row}", "", array("q", [0] * _PROMPT_LEN), params)
        req.full_untruncated_fill_ids = req.origin_input_ids
        req.extend_end = _PROMPT_LEN
        req.logprob_start_len = -1
        reqs.append(req)
    return ScheduleBatch.init_new(
        reqs=reqs,
        req_to_token_pool=pool,
        token_to_kv_pool_allocator=allocator,
        tree_cache=_NoCache(
            page_size=worker.page_size,
            device=pool.device,
            token_to_kv_pool_allocator=allocator,
        ),
        model_config=model_config,
        enable_overlap=False,
        spec_algorithm=worker.speculative_algorithm,
    )


class _NoCache(SimpleNamespace):
    """As much of a prefix cache as allocating slots asks for."""

    def supports_swa(self) -> bool:
        return False

    def supports_mamba(self) -> bool:
        return False

    def supports_prefix_sharing(self) -> bool:
        return True

    def evict(self, _: Any) -> None:
        """There is nothing to evict."""

    def maybe_hand_to_session(self, _: Any) -> None:
        """There are no sessions."""


def _warm_up_samplers(runner: Any, device: str) -> None:
    vocab = runner.model_config.vocab_size
    for rows in _BATCH_SIZES:
        for kind in _kinds():
            info = _info(rows, vocab, device, **kind)
            logits = torch.randn(rows, vocab, device=device)
            info.apply_logits_bias(logits)
            output = LogitsProcessorOutput(next_token_logits=logits)
            positions = torch.arange(rows, device=device)
            runner.sampler(output, info, False, [], [], positions)


def _kinds() -> list[dict[str, Any]]:
    seeded = get_exec().deterministic.enable_deterministic_inference
    kinds: list[dict[str, Any]] = [
        {"greedy": True},
        {},
        {"top_p": 0.9, "top_k": 40},
        {"penalised": True},
    ]
    # With a seed SGLang's torch sampler cannot apply min-p.
    return kinds if seeded else [*kinds, {"top_p": 0.9, "min_p": 0.1}]


def _info(
    rows: int,
    vocab: int,
    device: str,
    *,
    greedy: bool = False,
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float = 0.0,
    penalised: bool = False,
) -> SamplingBatchInfo:
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    seeded = get_exec().deterministic.enable_deterministic_inference
    top_k = 1 if greedy else top_k or TOP_K_ALL
    additive = torch.zeros(rows, vocab, device=device) if penalised else None
    scaling = torch.ones(rows, vocab, device=device) if penalised else None
    return SamplingBatchInfo(
        temperatures=torch.ones(rows, 1, device=device),
        top_ps=torch.full((rows,), top_p, device=device),
        top_ks=torch.full((rows,), top_k, dtype=torch.int32, device=device),
        min_ps=torch.full((rows,), min_p, device=device),
        is_all_greedy=greedy,
        is_any_greedy=greedy,
        need_top_p_sampling=top_p != 1.0,
        need_top_k_sampling=top_k != TOP_K_ALL,
        need_min_p_sampling=min_p > 0,
        vocab_size=vocab,
        acc_additive_penalties=additive,
        acc_scaling_penalties=scaling,
        sampling_seed=torch.arange(rows, device=device) if seeded else None,
        max_top_k=None if top_k == TOP_K_ALL else top_k,
        device=device,
        logit_bias=torch.zeros(rows, vocab, device=device) if penalised else None,
    )
