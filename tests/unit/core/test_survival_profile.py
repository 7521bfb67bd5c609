"""What the next drafts will be worth, from those of earlier rounds."""

import numpy as np
import pytest

from sglang_tetris.core.survival_profile import SurvivalProfile

PADDING = 0


def trees(*rows: list[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Survival and depths of trees given as (depth, survival)."""
    width = max(len(row) for row in rows)
    padded = [row + [(PADDING, 0.7)] * (width - len(row)) for row in rows]
    survival = np.array([[s for _, s in row] for row in padded], np.float32)
    return survival, np.array([[d for d, _ in row] for row in padded], np.int64)


def seen(max_depth: int, *rows: list[tuple[int, float]], rounds: int = 300):
    profile = SurvivalProfile(max_depth)
    survival, depths = trees(*rows)
    for _ in range(rounds):
        profile.add(survival, depths, drafted_depth=max_depth)
    return profile


def totals(profile: SurvivalProfile, requests: int = 1) -> tuple[list, list]:
    drafts, correct = profile.curves(requests)
    return drafts[:, -1].tolist(), correct[:, -1].tolist()


def test_the_curve_goes_through_the_best_drafts_of_a_batch():
    """Two trees of 3 and 2 nodes: the best 1, 2, ... drafts of four such requests."""
    profile = seen(2, [(1, 0.8), (1, 0.1), (2, 0.4)], [(1, 0.5), (2, 0.2)])
    drafts, correct = profile.curves(4)
    best = np.cumsum([0, 0.8, 0.5, 0.4, 0.2, 0.1])
    # Each of the two was seen in half of the requests: twice each among four.
    found = np.interp([0, 2, 4, 6, 8, 10], drafts[1], correct[1])
    assert found == pytest.approx(2 * best, rel=1e-5)
    drafts_one, correct_one = drafts[0], correct[0]
    assert np.interp([2, 4, 6], drafts_one, correct_one) == pytest.approx(
        [1.6, 2.6, 2.8], rel=1e-5
    )


def test_curves_never_fall_and_a_draft_is_worth_at_most_itself():
    rng = np.random.default_rng(0)
    profile = SurvivalProfile(3)
    for _ in range(20):
        depths = rng.integers(0, 4, (5, 9))
        survival = rng.random((5, 9)).astype(np.float32)
        profile.add(survival, depths, drafted_depth=3)
        drafts, correct = profile.curves(5)
        assert (np.diff(drafts, axis=1) >= 0).all()
        assert (np.diff(correct, axis=1) >= 0).all()
        assert (np.diff(drafts, axis=0) >= -1e-9).all()
        # Also while the benefit of the doubt is at its largest.
        assert (correct <= drafts + 1e-9).all()


def test_padding_and_undrafted_rounds_count_for_nothing():
    profile = SurvivalProfile(2)
    survival, depths = trees([(1, 0.5)], [])
    profile.add(survival[:0], depths[:0], drafted_depth=2)
    profile.add(survival, depths, drafted_depth=0)
    assert not profile.is_known(1)
    profile.add(survival, depths, drafted_depth=1)
    assert profile.is_known(1)
    assert not profile.is_known(2)
    # One draft for two requests.
    assert totals(profile, 2)[0][0] == pytest.approx(1)


def test_recent_text_counts_more_than_the_long_run():
    profile = seen(1, [(1, 0.2)], rounds=2000)
    survival, depths = trees([(1, 0.8)])
    for _ in range(128):
        profile.add(survival, depths, drafted_depth=1)
    # 81 recent requests' worth of the new, 47 + 32 of the old one.
    assert 0.5 < totals(profile)[1][0] < 0.7


def test_what_is_not_drafted_goes_back_to_what_it_usually_is():
    profile = seen(1, [(1, 0.2)], rounds=2000)
    survival, depths = trees([(1, 0.8)])
    for _ in range(64):
        profile.add(survival, depths, drafted_depth=1)
    assert totals(profile)[1][0] > 0.35
    for _ in range(1000):
        profile.fade(0)
    assert totals(profile)[1][0] < 0.25


def test_easy_text_is_easy_at_depths_that_are_not_drafted():
    profile = seen(2, [(1, 0.4), (2, 0.2)], rounds=2000)
    survival, depths = trees([(1, 0.8)])
    for _ in range(400):
        profile.add(survival, depths, drafted_depth=1)
        profile.fade(1)
    first, both = totals(profile)[1]
    assert first == pytest.approx(0.8, rel=0.15)
    assert both - first == pytest.approx(first / 2, rel=0.15)


def test_what_was_hardly_seen_gets_the_benefit_of_the_doubt():
    few, many = seen(1, [(1, 0.4)], rounds=2), seen(1, [(1, 0.4)], rounds=1000)
    assert totals(many)[1][0] == pytest.approx(0.4, rel=1e-5)
    assert 0.45 < totals(few)[1][0] <= 0.5
    # And so does, in the end, what was seen long ago.
    for _ in range(60_000):
        many.fade(0)
    assert totals(many)[1][0] > 0.42


def test_the_long_run_is_what_a_request_is_worth():
    profile = seen(2, [(1, 0.5), (2, 0.25)], [(1, 0.1)])
    assert profile.correct_per_request() == pytest.approx(0.425, rel=1e-5)
