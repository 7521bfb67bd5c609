"""What TETRIS cannot serve is refused at start-up, each thing in one sentence."""

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="the adapter needs SGLang")

from sglang.srt.server_args import ServerArgs

from sglang_tetris.adapter import options, startup
from sglang_tetris.adapter.options import TetrisOptions
from sglang_tetris.core import CostTable
from sglang_tetris.core.errors import TetrisConfigError

LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 8}


@pytest.fixture(autouse=True)
def _own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(options.OPTIONS_ENV, raising=False)


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    found = {}
    for name, architecture in (
        ("target", "LlamaForCausalLM"),
        ("standalone", "LlamaForCausalLM"),
        ("eagle", "LlamaForCausalLMEagle"),
        ("eagle3", "LlamaForCausalLMEagle3"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        config = LLAMA | {"architectures": [architecture]}
        (folder / "config.json").write_text(json.dumps(config))
        found[name] = str(folder)
    return found


def _args(paths: dict[str, str], draft: str | None = "eagle", **fields) -> ServerArgs:
    return ServerArgs(
        model_path=paths["target"],
        speculative_algorithm="TETRIS",
        speculative_draft_model_path=None if draft is None else paths[draft],
        **fields,
    )


def _refusal(args: ServerArgs) -> str:
    with pytest.raises(TetrisConfigError) as caught:
        startup.check_raw_args(args)
    message = str(caught.value)
    assert "\n" not in message
    return message


REFUSED = [
    ({"enable_lora": True}, "LoRA"),
    ({"lora_paths": ["a=b"]}, "LoRA"),
    ({"pp_size": 2}, "pipeline"),
    ({"speculative_adaptive": True}, "--speculative-adaptive"),
    ({"enable_watermark": True}, "watermark"),
    ({"enable_dp_attention": True}, "DP attention"),
    ({"enable_mixed_chunk": True}, "mixed chunk"),
    ({"enable_multi_layer_eagle": True}, "multi-layer"),
    ({"enable_hierarchical_cache": True}, "hierarchical"),
    ({"enable_two_batch_overlap": True}, "two-batch"),
    ({"enable_pdmux": True}, "pdmux"),
    ({"disaggregation_mode": "prefill"}, "PD disaggregation"),
    ({"dllm_algorithm": "LowConfidence"}, "diffusion"),
    ({"enable_return_hidden_states": True}, "hidden-states"),
    ({"return_hidden_states_mode": "last"}, "hidden-states"),
    ({"speculative_draft_window_size": 8}, "window"),
    ({"speculative_draft_sink_size": 4}, "sink"),
    ({"attn_cp_size": 2}, "context parallelism"),
    ({"tokenizer_worker_num": 2}, "tokenizer workers"),
    ({"use_ray": True}, "Ray"),
    ({"speculative_use_rejection_sampling": True}, "--tetris-verify"),
    ({"speculative_use_block_verification": True}, "--tetris-verify"),
    ({"speculative_accept_threshold_single": 0.5}, "exact"),
    ({"speculative_accept_threshold_acc": 0.5}, "exact"),
]


@pytest.mark.parametrize(("fields", "names"), REFUSED)
def test_unsupported_features_are_refused(paths, fields, names) -> None:
    assert names in _refusal(_args(paths, **fields))


def test_every_refused_field_is_tested() -> None:
    listed = {row[0] for row in (*startup._REFUSED, *startup._REPLACED)}
    assert listed == {field for fields, _ in REFUSED for field in fields}


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ({"tetris_verify": "guess"}, "tetris-verify"),
        ({"tetris_draft": "none"}, "none"),
        ({"tetris_draft": "medusa"}, "tetris-draft"),
        ({"tetris_draft": "eagle3"}, "eagle3"),
        ({"tetris_budget": "many"}, "many"),
        ({"tetris_budget": "-1"}, "-1"),
        ({"tetris_cost_table": "/nowhere.json"}, "--tetris-cost-table"),
        ({"tetris_trace": "/nowhere/t.jsonl"}, "--tetris-trace"),
        ({"tetris_config": '{"max_draft": 1}'}, "max_drafts"),
        ({"tetris_config": '{"calibration_path": "/dev/null"}'}, "calibration_path"),
        ({"tetris_config": "/nowhere.json"}, "/nowhere.json"),
        ({"tetris_config": "{"}, "JSON"),
    ],
)
def test_bad_flags_are_refused(paths, chosen, names) -> None:
    options.publish(TetrisOptions(**chosen))
    assert names in _refusal(_args(paths))


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"speculative_eagle_topk": 2}, "sampled trees"),
        ({"enable_deterministic_inference": True}, "seeds"),
    ],
)
def test_what_rejection_cannot_do_is_refused(paths, fields, names) -> None:
    options.publish(TetrisOptions(tetris_verify="rejection"))
    startup.check_raw_args(_args(paths))
    assert names in _refusal(_args(paths, **fields))


def test_a_cost_table_without_the_parts_of_a_round_is_refused(paths, tmp_path) -> None:
    table = tmp_path / "table.json"
    table.write_text(CostTable(token_knots=(1,), knot_times_s=(1.0,)).to_json())
    options.publish(TetrisOptions(tetris_cost_table=str(table)))
    assert "lacks the phases" in _refusal(_args(paths))


def test_too_few_kept_tokens_are_refused(paths) -> None:
    options.publish(TetrisOptions(tetris_config='{"kept_tokens": 3}'))
    with pytest.raises(TetrisConfigError, match="kept_tokens must be more than"):
        startup.finish_server_args(_resolved())


def test_a_missing_draft_is_refused(paths) -> None:
    assert "--speculative-draft-model-path" in _refusal(_args(paths, draft=None))


def test_a_token_map_is_refused_where_it_would_be_ignored(paths) -> None:
    args = _args(paths, draft="eagle3", speculative_token_map="map.pt")
    assert "--speculative-token-map" in _refusal(args)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "standalone"])
def test_the_kind_reaches_the_spawned_processes(paths, kind) -> None:
    startup.check_raw_args(_args(paths, draft=kind))
    assert options.current().draft_kind == kind


def _resolved(**fields) -> ServerArgs:
    args = ServerArgs(model_path="dummy", attention_backend="tetris_cpu", page_size=1)
    for name, value in ({"device": "cpu"} | fields).items():
        setattr(args, name, value)
    return args


def test_other_attention_backends_are_refused() -> None:
    with pytest.raises(TetrisConfigError, match="triton"):
        startup.refuse_unsupported(_resolved(attention_backend="triton"))
    startup.refuse_unsupported(_resolved(attention_backend="flashinfer"))


@pytest.mark.parametrize(
    ("given", "settled"),
    [
        ((None, None, None), (3, 1, 4)),
        ((2, None, None), (2, 1, 3)),
        ((3, 2, None), (3, 2, 7)),
        ((3, 2, 6), (3, 2, 6)),
    ],
)
def test_the_tree_shape_is_settled(given, settled) -> None:
    names = ("num_steps", "eagle_topk", "num_draft_tokens")
    names = [f"speculative_{name}" for name in names]
    args = _resolved(**dict(zip(names, given, strict=True)))
    startup.finish_server_args(args)
    assert tuple(getattr(args, name) for name in names) == settled
    assert args.max_running_requests is None, "plain decoding's default is kept"


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((3, 1, 6), "chain"),
        ((1, 2, 4), "more than the tree"),
        ((-1, 1, None), "num-steps"),
        ((2, 1, 1), "num-draft-tokens"),
    ],
)
def test_impossible_shapes_are_refused(shape, names) -> None:
    steps, topk, width = shape
    args = _resolved(
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=width,
    )
    with pytest.raises(TetrisConfigError, match=names):
        startup.finish_server_args(args)


def test_options_survive_the_way_to_a_spawned_process() -> None:
    chosen = TetrisOptions(tetris_budget="3x", draft_kind="eagle")
    options.publish(chosen)
    assert options.current() == chosen
    assert dataclasses.asdict(TetrisOptions())["tetris_budget"] == "auto"


def test_configure_takes_the_command_lines_keys() -> None:
    options.configure(tetris_budget=16, tetris_config={"max_drafts": 2})
    parsed = options.current().parsed()
    assert (str(parsed.budget), parsed.max_drafts) == ("16", 2)
    with pytest.raises(ValueError, match="tetris_buget"):
        options.configure(tetris_buget=16)
    with pytest.raises(ValueError, match="tetris-budget"):
        options.configure(tetris_budget="lots")
