"""Settings: what the flags accept, and the one sentence for what they do not."""

import pytest

from sglang_tetris.core import FixedBudget, MeanBudget, TetrisConfig, TetrisConfigError
from sglang_tetris.core.config import parse_budget, parse_request


def test_defaults():
    config = TetrisConfig.parse()
    assert str(config.budget) == "auto"
    assert (config.verify, config.draft) == ("match", "auto")
    assert config.cost_table is config.trace is config.max_drafts is None


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("0", FixedBudget, 0),
        ("16", FixedBudget, 16),
        (1000, FixedBudget, 1000),
        ("1x", MeanBudget, 1),
        ("3X", MeanBudget, 3),
        ("0x", MeanBudget, 0),
    ],
)
def test_budgets(text, kind, value):
    spec = parse_budget(text)
    assert str(spec) == str(text).lower()
    policy = spec.policy()
    assert type(policy) is kind
    assert repr(policy) == f"{kind.__name__}({value})"


def test_auto_has_no_policy_of_its_own():
    assert parse_budget("auto").policy() is None


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1.5", "1.5x", "x3", "3xx", "many", "1e3", True, "-2x"]
)
def test_bad_budgets(text):
    with pytest.raises(TetrisConfigError, match="tetris-budget") as error:
        TetrisConfig.parse(budget=text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"verify": "matsch"}, "tetris-verify .* 'matsch'; did you mean 'match'"),
        ({"draft": "eagle2"}, "tetris-draft .* 'eagle2'; did you mean 'eagle"),
        ({"draft": ""}, "tetris-draft .* ''"),
        ({"cost_table": ""}, "tetris-cost-table .* ''"),
        ({"trace": 3}, "tetris-trace .* 3"),
        ({"config": "{"}, "tetris-config is not valid JSON"),
        ({"config": "[]"}, r"tetris-config must be an object, got \[\]"),
        ({"config": {"max_draft": 1}}, "'max_draft'; did you mean 'max_drafts'"),
        ({"config": {"zzz": 1}}, r"'zzz'; known: \['max_drafts', "),
        ({"config": {"cost_table": "p"}}, "'cost_table' .* --tetris-cost-table"),
        ({"config": {"max_drafts": -1}}, "tetris-config.max_drafts .* -1"),
        ({"config": '{"max_drafts": "3"}'}, "tetris-config.max_drafts .* '3'"),
        ({"config": {"max_drafts": True}}, "tetris-config.max_drafts .* True"),
    ],
)
def test_bad_flags(flags, message):
    with pytest.raises(TetrisConfigError, match=message) as error:
        TetrisConfig.parse(**flags)
    assert isinstance(error.value, ValueError)
    assert "\n" not in str(error.value)


def test_extra_keys_from_text_or_object():
    for extra in ('{"max_drafts": 4}', {"max_drafts": 4}):
        assert TetrisConfig.parse(config=extra).max_drafts == 4


def test_a_request_can_only_lower_its_cap():
    config = TetrisConfig.parse(config={"max_drafts": 4})
    assert [config.request_max_drafts(own) for own in (None, 2, 9, 0)] == [4, 2, 4, 0]
    assert TetrisConfig.parse().request_max_drafts(None) is None
    assert TetrisConfig.parse().request_max_drafts(7) == 7


@pytest.mark.parametrize(
    ("params", "cap"),
    [(None, None), ({}, None), ({"other": 1}, None), ({"tetris": {}}, None)]
    + [({"tetris": {"max_drafts": n}}, n) for n in (0, 5, None)],
)
def test_request_parameters(params, cap):
    assert parse_request(params).max_drafts == cap


@pytest.mark.parametrize(
    ("tetris", "message"),
    [
        ({"max_drafts": -2}, "custom_params.tetris.max_drafts .* -2"),
        ({"max_drafts": 1.5}, "custom_params.tetris.max_drafts .* 1.5"),
        ({"maxdrafts": 1}, "'maxdrafts'; did you mean 'max_drafts'"),
        (3, "custom_params.tetris must be an object, got 3"),
    ],
)
def test_bad_request_parameters(tetris, message):
    with pytest.raises(TetrisConfigError, match=message):
        parse_request({"tetris": tetris})
