"""Where TETRIS joins SGLang's own code, all in one list.

Each hook is a few lines and calls into the module that knows the matter. Hooks that
belong to a running server look at its algorithm first: a server that runs something
else behaves as without this package.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from sglang_tetris.adapter import control, options, reporting, reserve, startup
from sglang_tetris.core.config import parse_request
from sglang_tetris.core.errors import TetrisConfigError

_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_COMPONENTS = "sglang.srt.managers.scheduler_components"
_STREAMER = f"{_COMPONENTS}.output_streamer.SchedulerOutputStreamer"
_INTERNAL = f"{_COMPONENTS}.internal_state.SchedulerInternalStateController"
_METRICS = f"{_COMPONENTS}.metrics_reporter.SchedulerMetricsReporter"
_SIZING = "sglang.srt.mem_cache.allocation_sizing"
_PARAMS = "sglang.srt.sampling.sampling_params.SamplingParams"

# Set by tests only: lets them plant a bias, to see that they would find one.
TEST_SWITCHES_ENV = "SGLANG_TETRIS_TEST_SWITCHES"

_from_command_line = False


def add_cli_args(_: Any, parser: Any) -> None:
    options.add_flags(parser)


def from_cli_args(_: Any, cls: type, args: Any) -> None:
    global _from_command_line
    _from_command_line = True
    options.publish_parsed_args(args)


def resolve_once(original: Callable[[Any], None], server_args: Any) -> None:
    """Refuse first; on the command line a refusal is one sentence, not a trace."""
    if not startup.wants_tetris(server_args):
        return original(server_args)
    try:
        if not vars(server_args).get("_resolution_finished"):
            startup.check_raw_args(server_args)
            if _from_command_line:
                control.add_route()
        return original(server_args)
    except TetrisConfigError as error:
        if not _from_command_line:
            raise
        print(f"sglang: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def verify_params(_: Any, params: Any, vocab_size: int) -> None:
    """Check a request's parameters where SGLang does; ValueError becomes a 400."""
    from sglang.srt.runtime_context import get_exec, get_spec

    if str(get_spec().speculative_algorithm).upper() != "TETRIS":
        return
    if params.custom_params is not None:
        parse_request(params.custom_params)
    deterministic = get_exec().deterministic.enable_deterministic_inference
    if deterministic and params.min_p > 0:
        raise ValueError(
            "min_p cannot be combined with a sampling seed, and with "
            "--enable-deterministic-inference every request has one"
        )


def update_handlers(handlers: dict[str, Any], controller: Any) -> dict[str, Any]:
    """Add the budget to what /set_internal_state can change."""
    from sglang.srt.managers.scheduler_components.internal_state import (
        UpdateRejected,
        _UpdateHandler,
    )

    worker = controller.scheduler.draft_worker
    if not reporting.is_tetris(controller.scheduler.spec_algorithm):
        return handlers

    def validate(key: str, value: Any) -> None:
        try:
            control.from_number(key, value)
        except ValueError as error:
            raise UpdateRejected(str(error)) from error

    def apply(key: str, value: Any) -> None:
        worker.planner.use(control.from_number(key, value))

    handler = _UpdateHandler(validate, apply)
    ours = {control.PER_STEP: handler, control.PER_REQUEST: handler}
    if os.environ.get(TEST_SWITCHES_ENV):
        for name, switch in worker.test_switches().items():
            ours[name] = _UpdateHandler(
                lambda _, value: None, lambda _, value, switch=switch: switch(value)
            )
    return {**handlers, **ours}


def add_speculative(_: Any, controller: Any, state: dict[str, Any]) -> None:
    """Show the effective configuration and the totals in /server_info."""
    if reporting.is_tetris(controller.scheduler.spec_algorithm):
        scheduler = controller.scheduler
        state["tetris"] = {
            **scheduler.draft_worker.describe(),
            "kv_pool": {
                "size": scheduler.max_total_num_tokens,
                "free": scheduler.token_to_kv_pool_allocator.available_size(),
                "evictable": scheduler.tree_cache.evictable_size(),
            },
        }


def build_customized_info(
    info: dict[str, list[Any]], streamer: Any, reqs: list[Any]
) -> dict[str, list[Any]]:
    if not reporting.is_tetris(streamer.spec_algorithm):
        return info
    return {**info, reporting.META_KEY: [reporting.request_info(req) for req in reqs]}


def is_request_level_key(known: bool, _: Any, key: str) -> bool:
    return known or key == reporting.META_KEY


def update_meta_info(
    original: Callable[..., None],
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, Any],
    index: int,
    finish_reason: Any,
) -> None:
    """Take our entry as it is; SGLang would join the values of successive chunks."""
    ours = customized_info.get(reporting.META_KEY)
    if ours is not None:
        meta_info[reporting.META_KEY] = ours[index]
        customized_info = {
            key: values
            for key, values in customized_info.items()
            if key != reporting.META_KEY
        }
    original(manager, meta_info, state, customized_info, index, finish_reason)


def spec_metrics(_: Any, manager: Any, meta_info: dict[str, Any], *args: Any) -> None:
    ours = meta_info.get(reporting.META_KEY)
    if ours is not None:
        meta_info.update(reporting.truthful_meta_info(ours))


def report_decode_stats(
    original: Callable[..., None], reporter: Any, *args: Any, **kwargs: Any
) -> None:
    """Make the log line's and the gauge's accept rate correct / verified."""
    if reporting.is_tetris(reporter.scheduler.spec_algorithm):
        due = reporter.forward_ct_decode % reporter.decode_log_interval == 0
        reporter.scheduler.draft_worker.reporter.before_log(reporter, due)
    original(reporter, *args, **kwargs)


def extra_context_len(extra: int) -> int:
    """Widen a request's row of slots to hold what a round reserves past the context.

    A round reads and writes up to one reserve past the committed tokens, also of a
    request that is about to reach the context length.
    """
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
    from sglang.srt.runtime_context import get_schedule, get_spec

    if str(get_spec().speculative_algorithm).upper() != "TETRIS":
        return extra
    return max(extra, get_alloc_reserve_per_decode() + get_schedule().page_size)


def alloc_reserve(full: int) -> int:
    """Set aside for a round without drafts what plain decoding needs."""
    return reserve.reserve_of(full)


# (target, hook, how it is attached)
HOOKS: tuple[tuple[str, Callable[..., Any], str], ...] = (
    (f"{_SERVER_ARGS}.add_cli_args", add_cli_args, "after"),
    (f"{_SERVER_ARGS}.from_cli_args", from_cli_args, "after"),
    (f"{_SERVER_ARGS}.resolve_once", resolve_once, "around"),
    (f"{_PARAMS}.verify", verify_params, "after"),
    (f"{_INTERNAL}._update_handlers", update_handlers, "after"),
    (f"{_INTERNAL}._add_speculative", add_speculative, "after"),
    (f"{_STREAMER}.build_additional_customized_info", build_customized_info, "after"),
    (
        f"{_STREAMER}.is_request_level_customized_info_key",
        is_request_level_key,
        "after",
    ),
    (f"{_TOKENIZER}.update_request_meta_info", update_meta_info, "around"),
    (f"{_TOKENIZER}._calculate_spec_decoding_metrics", spec_metrics, "after"),
    (f"{_METRICS}.report_decode_stats", report_decode_stats, "around"),
    (f"{_SIZING}.get_req_to_token_extra_context_len", extra_context_len, "after"),
    (f"{_SIZING}.get_alloc_reserve_per_decode", alloc_reserve, "after"),
)


def register() -> None:
    """Hand the hooks to SGLang, which applies them once all plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook, how in HOOKS:
        HookRegistry.register(target, hook, HookType(how))
