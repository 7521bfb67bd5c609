"""Runs at start-up what the first request would otherwise wait for.

Covers the compiled functions of the core and every kind of sampling: greedy,
multinomial, top-k / top-p / min-p, seeded, penalties, bias. The forwards of the target
and the draft are warmed by SGLang's own warm-up request.
"""

import logging
import time
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_tetris import core

logger = logging.getLogger(__name__)

# One row and several: the two shapes a shape-specialising compiler tells apart.
_BATCH_SIZES = (1, 2, 5)


def warm_up(runner: Any, device: str) -> None:
    """Compile the core's functions and run each sampler kind once per shape."""
    begin = time.perf_counter()
    core.warm_up()
    vocab = runner.model_config.vocab_size
    for rows in _BATCH_SIZES:
        for kind in _kinds():
            info = _info(rows, vocab, device, **kind)
            logits = torch.randn(rows, vocab, device=device)
            info.apply_logits_bias(logits)
            output = LogitsProcessorOutput(next_token_logits=logits)
            positions = torch.arange(rows, device=device)
            runner.sampler(output, info, False, [], [], positions)
    logger.info("TETRIS: warmed up in %.1f s.", time.perf_counter() - begin)


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
