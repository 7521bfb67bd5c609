"""Which requests' drafts are accepted by another law than their temperature's."""

import pytest

pytest.importorskip("sglang")

from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

from sglang_tetris.adapter.request_settings import draft_caps_host, settings_of
from sglang_tetris.core import sampling_class
from sglang_tetris.core.config import TetrisConfig
from tests.unit.adapter.upstream_objects import regex, request

CONFIG = TetrisConfig()

TRANSFORMED = {
    "frequency penalty": {"frequency_penalty": 0.1},
    "negative frequency penalty": {"frequency_penalty": -0.5},
    "presence penalty": {"presence_penalty": 0.1},
    "repetition penalty": {"repetition_penalty": 1.1},
    "repetition reward": {"repetition_penalty": 0.9},
    "min_new_tokens": {"min_new_tokens": 1},
    "logit bias": {"logit_bias": {"5": -100.0}},
    "custom processor": {
        "processor": DisallowedTokensLogitsProcessor.to_str(),
        "custom_params": {"token_ids": [1]},
    },
}
PLAIN = {
    "nothing": {},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.1},
    "a seed": {"sampling_seed": 3},
    "an empty bias": {"logit_bias": {}},
    "stops": {"stop": ["x"], "stop_token_ids": {4}, "ignore_eos": True},
    "our own settings": {"custom_params": {"tetris": {"max_drafts": 2}}},
    "someone else's params": {"custom_params": {"token_ids": [1]}},
}


def class_of(temperature: float, **kind: object) -> int:
    req = request(temperature=temperature, **kind)
    return settings_of(req, CONFIG, True).sampling_class


@pytest.mark.parametrize("temperature", [0.0, 0.4, 0.8, 1.5])
@pytest.mark.parametrize("kind", TRANSFORMED.values(), ids=list(TRANSFORMED))
def test_what_changes_the_logits_is_transformed(kind: dict, temperature: float) -> None:
    wanted = sampling_class(temperature, transformed=True)
    assert class_of(temperature, **kind) == wanted


@pytest.mark.parametrize("temperature", [0.0, 0.4, 0.8, 1.5])
@pytest.mark.parametrize("kind", PLAIN.values(), ids=list(PLAIN))
def test_what_leaves_them_alone_is_plain(kind: dict, temperature: float) -> None:
    wanted = sampling_class(temperature, transformed=False)
    assert class_of(temperature, **kind) == wanted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_grammars_transform(temperature: float) -> None:
    """Allowed tokens are given to SGLang as a grammar: a regex, EBNF or schema."""
    wanted = sampling_class(temperature, transformed=True)
    assert class_of(temperature, regex="[ab]*", grammar=regex("[ab]*")) == wanted


def test_greedy_is_told_from_a_temperature_of_1() -> None:
    """SGLang writes temperature 0 as top_k 1 at temperature 1."""
    assert request(temperature=0.0).sampling_params.temperature == 1.0
    assert class_of(0.0) == sampling_class(0.0, transformed=False)
    assert class_of(1.0, top_k=1) == class_of(0.0)
    assert class_of(1.0, top_k=2) == sampling_class(1.0, transformed=False)


def test_settings_are_worked_out_once_per_request() -> None:
    req = request(temperature=0.4)
    found = settings_of(req, CONFIG, True)
    req.sampling_params.logit_bias = {"1": 1.0}
    assert settings_of(req, CONFIG, True) is found
    assert settings_of(request(temperature=0.4), CONFIG, True) is not found


def test_a_request_drafts_no_more_than_it_may_and_can_use() -> None:
    """The bonus token is one of those that it may still emit."""
    config = TetrisConfig(max_drafts=5)
    own = {"custom_params": {"tetris": {"max_drafts": 2}}}
    reqs = [
        request(max_new_tokens=100),
        request(max_new_tokens=100, **own),
        request(output=(1, 1), max_new_tokens=6),
        request(output=(1, 1), max_new_tokens=3),
        request(max_new_tokens=None),
    ]
    settings = [settings_of(req, config, True) for req in reqs]
    assert draft_caps_host(reqs, settings, 7) == [5, 2, 3, 0, 5]
