"""What is reported is what happened, per request and for the server."""

from types import SimpleNamespace

import pytest

from sglang_tetris.adapter.reporting import (
    RoundReporter,
    request_info,
    truthful_meta_info,
)
from sglang_tetris.core import DraftCounters


def _round(proposed: int, verified: int, correct: int) -> DraftCounters:
    return DraftCounters(
        num_rounds=1,
        num_proposed_drafts=proposed,
        num_verify_drafts=verified,
        num_correct_drafts=correct,
    )


@pytest.fixture
def told() -> tuple[RoundReporter, list[SimpleNamespace]]:
    reporter, reqs = RoundReporter(), [SimpleNamespace(), SimpleNamespace()]
    reporter.record_round_host(
        reqs, "2x", 4, [None, 1], [_round(3, 3, 2), _round(1, 1, 0)]
    )
    reporter.record_round_host(reqs[:1], "2x", 2, [None], [_round(3, 1, 1)])
    return reporter, reqs


def test_requests_add_up_to_the_server(told) -> None:
    reporter, reqs = told
    totals = reporter.describe()
    infos = [request_info(req) for req in reqs]
    for name in ("num_rounds", "num_proposed_drafts", "num_verify_drafts"):
        assert totals[name] == sum(info[name] for info in infos)
    assert (totals["num_steps"], totals["draft_budget"]) == (2, 2)
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
