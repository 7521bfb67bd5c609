"""The kind of sampling whose cost a round has, as SGLang describes batches."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams

from sglang_tetris.adapter.round_view import _sampling

GREEDY, DRAWN = {"temperature": 0}, {"temperature": 1}
NUCLEUS = {"temperature": 1, "top_p": 0.9}


def info_of(*settings: dict) -> SimpleNamespace:
    """Return what SamplingBatchInfo.from_schedule_batch says of such requests."""
    params = [SamplingParams(**own) for own in settings]
    for own in params:
        own.normalize(None)
    return SimpleNamespace(
        is_all_greedy=all(own.top_k <= 1 for own in params),
        need_top_p_sampling=any(own.top_p != 1.0 for own in params),
        need_top_k_sampling=any(own.top_k != TOP_K_ALL for own in params),
        need_min_p_sampling=any(own.min_p > 0 for own in params),
    )


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ((GREEDY, GREEDY), "greedy"),
        ((DRAWN,), "multinomial"),
        ((DRAWN, NUCLEUS), "sorted"),
        ((DRAWN, {"temperature": 1, "min_p": 0.1}), "sorted"),
        # A greedy request has a top-k of 1, which is a filter among drawn ones.
        ((GREEDY, DRAWN), "sorted"),
    ],
)
def test_the_dearest_kind_of_the_batch(settings: tuple, kind: str) -> None:
    assert _sampling(info_of(*settings)) == kind
