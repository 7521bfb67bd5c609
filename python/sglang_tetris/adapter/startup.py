"""What is checked and settled before a server with TETRIS starts.

A combination that TETRIS cannot serve is refused here in one sentence; nothing is
switched off in silence. Three steps, called by SGLang's own argument resolution:
`check_raw_args` on what the user typed, `refuse_unsupported` and `finish_server_args`
once SGLang has filled in its defaults.
"""

import dataclasses
import logging
from typing import Any

from sglang_tetris.adapter import draft_config, options, trace
from sglang_tetris.adapter.calibration import read_calibration
from sglang_tetris.adapter.cost_file import read_cost_table
from sglang_tetris.adapter.cpu_device.names import ATTENTION_BACKEND
from sglang_tetris.core.errors import TetrisConfigError

logger = logging.getLogger(__name__)

CPU_BACKEND = ATTENTION_BACKEND
BACKENDS = (CPU_BACKEND, "flashinfer")
# (steps, topk, draft tokens with the anchor): chains are the cheapest to draft.
DEFAULT_SHAPE = (3, 1, 4)

# Field of SGLang's record -> value that is fine, and what is not supported.
_REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("enable_lora", (None, False), "LoRA (--enable-lora)"),
    ("lora_paths", (None, [], {}), "LoRA (--lora-paths)"),
    ("pp_size", (1,), "pipeline parallelism (--pp-size)"),
    ("speculative_adaptive", (False,), "--speculative-adaptive"),
    ("enable_watermark", (False,), "watermarking (--enable-watermark)"),
    ("enable_dp_attention", (False,), "DP attention (--enable-dp-attention)"),
    ("enable_mixed_chunk", (False,), "mixed chunked prefill (--enable-mixed-chunk)"),
    ("enable_multi_layer_eagle", (False,), "--enable-multi-layer-eagle"),
    ("enable_hierarchical_cache", (False,), "the hierarchical cache"),
    ("enable_two_batch_overlap", (False,), "--enable-two-batch-overlap"),
    ("enable_pdmux", (False,), "--enable-pdmux"),
    ("disaggregation_mode", ("null",), "PD disaggregation (--disaggregation-mode)"),
    ("dllm_algorithm", (None,), "diffusion language models (--dllm-algorithm)"),
    ("enable_return_hidden_states", (False,), "--enable-return-hidden-states"),
    ("return_hidden_states_mode", (None, "null"), "--return-hidden-states-mode"),
    ("speculative_draft_window_size", (None,), "--speculative-draft-window-size"),
    ("speculative_draft_sink_size", (None,), "--speculative-draft-sink-size"),
    ("attn_cp_size", (1,), "context parallelism"),
    # SGLang loads no plugins in their processes, which then know no TETRIS.
    ("tokenizer_worker_num", (1,), "tokenizer workers (--tokenizer-worker-num)"),
    ("use_ray", (False,), "Ray (--use-ray)"),
)
_REPLACED: tuple[tuple[str, Any, str], ...] = (
    ("speculative_use_rejection_sampling", False, "--tetris-verify"),
    ("speculative_use_block_verification", False, "--tetris-verify"),
    ("speculative_accept_threshold_single", 1.0, "exact verification"),
    ("speculative_accept_threshold_acc", 1.0, "exact verification"),
)


def wants_tetris(server_args: Any) -> bool:
    """Whether this server was asked to run TETRIS."""
    return str(server_args.speculative_algorithm or "").upper() == "TETRIS"


def check_raw_args(server_args: Any) -> None:
    """Refuse what can be refused from the command line alone; find the draft's kind.

    server_args is SGLang's record before resolution. Publishes the draft kind for this
    process and the ones it will spawn. Raises TetrisConfigError or ValueError.
    """
    _refuse_fields(server_args)
    chosen = options.current()
    config = chosen.parsed()
    if config.verify == "rejection":
        _refuse_with_rejection(server_args)
    if config.draft == "none":
        raise TetrisConfigError(
            "--tetris-draft none needs look-up drafts, which do not exist yet; name a "
            "draft model with --speculative-draft-model-path"
        )
    if config.trace is not None:
        trace.check_writable(config.trace)
    if config.calibration and config.calibration_path is not None:
        read_calibration(config.calibration_path)
    if config.cost_table is not None:
        read_cost_table(config.cost_table)
    path = server_args.speculative_draft_model_path
    if not path:
        raise TetrisConfigError(
            "TETRIS needs a draft model: name it with --speculative-draft-model-path"
        )
    trust = bool(server_args.trust_remote_code)
    target = draft_config.read_config(server_args.model_path, "target model", trust)
    draft = draft_config.read_config(path, "draft model", trust)
    kind = draft_config.check_draft(draft, target, config.draft, path)
    if kind == "standalone":
        draft_config.check_same_tokens(path, server_args.model_path)
    if kind == "eagle3" and server_args.speculative_token_map is not None:
        raise TetrisConfigError(
            "--speculative-token-map has no effect on an EAGLE3 draft, which brings "
            "its own reduced vocabulary; leave it out"
        )
    options.publish(dataclasses.replace(chosen, draft_kind=kind))


def refuse_unsupported(server_args: Any) -> None:
    """Refuse fields that SGLang's resolution has filled in since `check_raw_args`."""
    _refuse_fields(server_args)
    for backend in {
        server_args.attention_backend,
        server_args.prefill_attention_backend,
        server_args.decode_attention_backend,
        server_args.speculative_draft_attention_backend,
    } - {None}:
        if backend not in BACKENDS:
            raise TetrisConfigError(
                f"TETRIS verifies ragged trees on the attention backends "
                f"{' and '.join(BACKENDS)}, not on {backend}"
            )


def finish_server_args(server_args: Any) -> None:
    """Settle the tree shape and what TETRIS needs of the scheduler, in place.

    Leaves `max_running_requests` as plain decoding has it: at high load the budget
    falls, not the number of requests.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    _settle_shape(server_args)
    if not server_args.disable_overlap_schedule:
        server_args.disable_overlap_schedule = True
        logger.info("TETRIS: rounds run without overlap scheduling.")
    if server_args.device != "cpu":
        graphs = server_args.cuda_graph_config
        server_args.cuda_graph_config = with_phase(
            graphs, Phase.DECODE, backend=Backend.DISABLED
        )
        logger.info("TETRIS: rounds run eagerly, without CUDA graphs.")
    kept = options.current().parsed().kept_tokens
    if kept <= server_args.speculative_num_steps:
        raise TetrisConfigError(
            f"tetris-config.kept_tokens must be more than the draft's "
            f"{server_args.speculative_num_steps} steps, got {kept}"
        )


def _refuse_with_rejection(server_args: Any) -> None:
    if (server_args.speculative_eagle_topk or 1) > 1:
        raise TetrisConfigError(
            "--tetris-verify rejection verifies chains, not sampled trees: set "
            "--speculative-eagle-topk 1, or use --tetris-verify match"
        )
    if server_args.enable_deterministic_inference:
        raise TetrisConfigError(
            "--tetris-verify rejection draws with noise of its own, so seeds cannot "
            "hold: leave out --enable-deterministic-inference, or use --tetris-verify "
            "match"
        )


def _settle_shape(server_args: Any) -> None:
    steps, topk, width = DEFAULT_SHAPE
    steps = server_args.speculative_num_steps or steps
    topk = server_args.speculative_eagle_topk or topk
    width = server_args.speculative_num_draft_tokens or (
        width if (steps, topk) == DEFAULT_SHAPE[:2] else steps * topk + 1
    )
    for name, value in (
        ("--speculative-num-steps", steps),
        ("--speculative-eagle-topk", topk),
        ("--speculative-num-draft-tokens", width - 1),
    ):
        if value < 1:
            raise TetrisConfigError(f"{name} is too small for a draft: {value}")
    if topk == 1 and width != steps + 1:
        raise TetrisConfigError(
            f"--speculative-num-draft-tokens {width} does not fit a chain: with topk 1 "
            f"it is num-steps + 1 = {steps + 1}"
        )
    largest = topk + (steps - 1) * topk * topk + 1
    if width > largest:
        raise TetrisConfigError(
            f"--speculative-num-draft-tokens {width} is more than the tree of {steps} "
            f"steps and topk {topk} can hold ({largest}, the anchor included)"
        )
    if topk > 1 and server_args.page_size > 1 and server_args.device != "cpu":
        raise TetrisConfigError(
            "TETRIS drafts trees (topk > 1) with --page-size 1 only on this device"
        )
    server_args.speculative_num_steps = steps
    server_args.speculative_eagle_topk = topk
    server_args.speculative_num_draft_tokens = width


def _refuse_fields(server_args: Any) -> None:
    for field, fine, what in _REFUSED:
        if getattr(server_args, field) not in fine:
            raise TetrisConfigError(f"TETRIS does not support {what}")
    for field, fine, instead in _REPLACED:
        if getattr(server_args, field) != fine:
            flag = "--" + field.replace("_", "-")
            raise TetrisConfigError(f"TETRIS ignores {flag}: it has {instead}")
