"""Follow the draft counts of a few rounds through the installed or a patched SGLang.

    python draft_counts_probe.py [DIR]

Run by test_patch.py in a process of its own. Modules that DIR holds are loaded from
there, all others from the installed package, whose byte code is ready. Two requests
go through two rounds, with the real classes from the worker's result to the user's
`meta_info`; only what has nothing to do with counting is a stand-in. Prints one JSON
object.
"""

import contextlib
import functools
import importlib.abc
import importlib.util
import json
import logging
import re
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace

import torch


class _Overlay(importlib.abc.MetaPathFinder):
    def __init__(self, folder):
        self.folder = folder

    def find_spec(self, fullname, path=None, target=None):
        file = self.folder.joinpath(*fullname.split(".")).with_suffix(".py")
        if not file.is_file():
            return None
        return importlib.util.spec_from_file_location(fullname, file)


# Before the first import of sglang.
if len(sys.argv) > 1:
    sys.meta_path.insert(0, _Overlay(Path(sys.argv[1])))

# ruff: noqa: E402
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.entrypoints.openai.utils import spec_tokens_details_from_meta_info
from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.multi_tokenizer_mixin import _handle_output_by_index
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components import (
    batch_result_processor,
    metrics_reporter,
)
from sglang.srt.managers.scheduler_components.output_streamer import (
    _GenerationStreamAccumulator,
)
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.sampling.sampling_params import SamplingParams

# Four drafts and the anchor.
SPEC = SimpleNamespace(speculative_num_draft_tokens=5, speculative_num_steps=4)
ACCEPT_LENS = [[3, 1], [2, 2]]  # per round and request, bonus token included
CAP_LENS = [[4, 1], [3, 2]]  # anchor included


class _Nothing:
    """Answers every attribute and call with another one, and is false."""

    def __getattr__(self, name):
        return _Nothing()

    def __call__(self, *args, **kwargs):
        return _Nothing()

    def __bool__(self):
        return False

    def __len__(self):
        return 0


def _reporter():
    reporter = object.__new__(metrics_reporter.SchedulerMetricsReporter)
    scheduler = _Nothing()
    scheduler.spec_algorithm = SimpleNamespace(
        is_none=lambda: False, is_dspark=lambda: False
    )
    pool_stats = SimpleNamespace(get_decode_usage_msg_parts=lambda: [])
    scheduler.pool_stats_observer = SimpleNamespace(get_pool_stats=lambda: pool_stats)
    values = {
        "scheduler": scheduler,
        "current_scheduler_metrics_enabled": False,
        "is_stats_logging_rank": True,
        "decode_log_interval": 1,
        "last_decode_stats_tic": 0.0,
        "enable_mfu_metrics": False,
        "_graph_backend_label": "graph",
    }
    for name, value in values.items():
        setattr(reporter, name, value)
    reporter.reset_metrics()
    return reporter


class _Counted(Exception):
    """Ends the processing of a round right after its counts were taken."""


def _stop():
    raise _Counted


def _run_rounds(reporter, reqs, capped):
    reporter.snapshot_spec_decode_metrics = _Nothing()
    real = batch_result_processor.SchedulerBatchResultProcessor
    processor = SimpleNamespace(
        metrics_reporter=reporter,
        model_worker=_Nothing(),
        advance_grammar_fsm=_Nothing(),
        snapshot_auxiliary_output_starts=_Nothing(),
        materialize_sampling_mask_output=_Nothing(),
        token_to_kv_pool_allocator=SimpleNamespace(free_group_begin=_stop),
    )
    resolve = functools.partial(real._resolve_spec_v2_tokens, processor)
    processor._resolve_spec_v2_tokens = resolve
    normalize = functools.partial(real._normalize_decode_outputs, processor)
    processor._normalize_decode_outputs = normalize
    batch = SimpleNamespace(
        reqs=reqs,
        spec_algorithm=SimpleNamespace(is_none=lambda: False),
        return_logprob=False,
        batch_size=lambda: len(reqs),
    )
    width = SPEC.speculative_num_draft_tokens
    for accept_lens, cap_lens in zip(ACCEPT_LENS, CAP_LENS, strict=True):
        result = GenerationBatchResult(
            next_token_ids=torch.zeros(len(reqs) * width, dtype=torch.int64),
            accept_lens=torch.tensor(accept_lens, dtype=torch.int32),
            cap_lens=torch.tensor(cap_lens, dtype=torch.int32) if capped else None,
            speculative_num_draft_tokens=width,
        )
        with contextlib.suppress(_Counted):
            real.process_batch_result_decode(processor, batch, result)
        for req, accept_len in zip(reqs, accept_lens, strict=True):
            req.output_ids.extend([0] * accept_len)


def _meta_infos(reqs):
    accumulator = _GenerationStreamAccumulator(
        return_logprob=False,
        return_hidden_states=False,
        return_routed_experts=False,
        return_indexer_topk=False,
        spec_algorithm=SimpleNamespace(is_none=lambda: False),
        disaggregation_mode=DisaggregationMode.NULL,
        default_stream_interval=1,
        default_force_stream_interval=1,
        get_cached_tokens_details=lambda req: None,
        is_request_level_customized_info_key=lambda key: False,
        current_weight_version=None,
    )
    for req in reqs:
        accumulator.accept(req=req)
    payload = accumulator.to_payload(dp_rank=0, is_idle_batch=False)
    detokenizer = SimpleNamespace(
        _decode_batch_token_id_output=lambda batch: [""] * len(batch.rids),
        _b64_encode_per_request=lambda values: None,
    )
    output = DetokenizerManager.handle_batch_token_id_out(detokenizer, payload)
    metas = []
    for index in range(len(reqs)):
        # With several tokenizer workers each output travels alone.
        one = _handle_output_by_index(output, index)
        meta: dict = {}
        calculate = tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics
        calculate(None, meta, one, 0)
        metas.append(meta)
    return metas


def _logged_accept_rate(reporter):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    metrics_reporter.logger.addHandler(handler)
    metrics_reporter.logger.setLevel(logging.INFO)
    batch = SimpleNamespace(reqs=[], forward_iter=1, dp_cooperation_info=None)
    reporter.report_decode_stats(False, running_batch=batch)
    metrics_reporter.logger.removeHandler(handler)
    return float(re.search(r"accept rate: ([\d.]+)", " ".join(lines)).group(1))


def probe(capped: bool) -> dict:
    """Return what the user and the log are told after the two rounds."""
    reqs = [Req(str(i), "", array("q", [1, 2]), SamplingParams()) for i in range(2)]
    for req in reqs:
        req.sampling_params.normalize(None)
        req.kv = SimpleNamespace(kv_committed_len=0)
    reporter = _reporter()
    _run_rounds(reporter, reqs, capped)
    metas = _meta_infos(reqs)
    details = [spec_tokens_details_from_meta_info(meta).model_dump() for meta in metas]
    return {
        "meta_info": metas,
        "openai": details,
        "logged_accept_rate": _logged_accept_rate(reporter),
    }


def main() -> None:
    """Probe once with capped rounds and once without."""
    for module in (batch_result_processor, metrics_reporter, tokenizer_manager):
        module.get_spec = lambda: SPEC
    metrics_reporter.get_disagg = _Nothing
    batch_result_processor.get_observability = _Nothing
    json.dump({"capped": probe(True), "full": probe(False)}, sys.stdout)


if __name__ == "__main__":
    main()
