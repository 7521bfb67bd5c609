"""What is reported is what happened, per request and for the server."""

from types import SimpleNamespace

import pytest

from sglang_tetris.adapter.reporting import (
    RoundReporter,
    request_info,
    truthful_meta_info,
)
from tests.reference.forests import trees_of
from tests.unit.adapter.records import finished


@pytest.fixture
def told() -> tuple[RoundReporter, list[SimpleNamespace]]:
    """Two rounds: 3 verified and 2 correct, 1 and none; then 1 verified and correct."""
    reporter, reqs = RoundReporter(), [SimpleNamespace(), SimpleNamespace()]
    chain = [(7, -1, 0.9), (8, 0, 0.9), (9, 1, 0.9)]
    both = trees_of(chain, [(4, -1, 0.5)])
    tokens = [7, 8, 1, 1, 3, 3]
    first = finished(both, tokens, budget=4, reqs=reqs, limits=[None, 1])
    reporter.record_round_host(first, "2x")
    second = finished(trees_of(chain), [7, 1], budget=1, reqs=reqs[:1])
    reporter.record_round_host(second, "2x")
    return reporter, reqs


def test_requests_add_up_to_the_server(told) -> None:
    reporter, reqs = told
    totals = reporter.describe()
    infos = [request_info(req) for req in reqs]
    for name in ("num_rounds", "num_proposed_drafts", "num_verify_drafts"):
        assert totals[name] == sum(info[name] for info in infos)
    assert (totals["num_steps"], totals["draft_budget"]) == (2, 1)
    assert infos[1]["max_drafts"] == 1


def test_meta_info_counts_rounds_and_not_the_prompts_token(told) -> None:
    _, (req, _) = told
    meta = truthful_meta_info(request_info(req))
    assert meta["spec_accept_length"] == (3 + 2) / 2
    assert meta["spec_accept_rate"] == 3 / 4
    assert meta["spec_num_trimmed_drafts"] == 2
    assert truthful_meta_info(request_info(SimpleNamespace())) == {}


def _stats(**more: int) -> SimpleNamespace:
    return SimpleNamespace(
        current_scheduler_metrics_enabled=False,
        is_stats_logging_rank=False,
        scheduler=SimpleNamespace(draft_worker=SimpleNamespace(max_drafts=3)),
        spec_num_correct_drafts=3,
        **more,
    )


def test_the_logged_rate_is_correct_over_verified(told) -> None:
    reporter, _ = told
    stats = _stats()
    reporter.before_log(stats, due=True)
    # SGLang divides by rounds x max_drafts = 3 x 3.
    assert stats.spec_num_correct_drafts / 9 == pytest.approx(3 / 5)


def test_a_patched_sglang_is_not_corrected_twice(told) -> None:
    reporter, _ = told
    stats = _stats(spec_num_verify_drafts=5)
    reporter.before_log(stats, due=True)
    assert stats.spec_num_correct_drafts == 3
