"""What is claimed of the recording that is shipped: a real model's drafts.

The recording is replayed whole, so these are the slowest unit tests: some 30 seconds.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rich")

from sglang_tetris.core.cost_table import CostTable
from sglang_tetris.core.replay import read_replay
from sglang_tetris.simulator.calibrator import LearntCalibration
from sglang_tetris.simulator.comparison import Effort, compare_budgets
from sglang_tetris.simulator.forests import Recording

FOLDER = Path(__file__).resolve().parents[3] / "benchmark/simulator"
SCRIPT = FOLDER / "calibration.py"
spec = importlib.util.spec_from_file_location("simulator_calibration", SCRIPT)
calibration = importlib.util.module_from_spec(spec)
spec.loader.exec_module(calibration)


@pytest.fixture(scope="module")
def replay():
    return read_replay(calibration.TRACE)


@pytest.fixture(scope="module")
def recording(replay) -> Recording:
    return Recording.from_replay(replay)


def test_it_has_several_kinds_of_prompt_and_of_sampling(replay) -> None:
    requests = replay.header.requests
    assert len({request.kind for request in requests}) >= 4
    assert len({request.sampling_class for request in requests}) == 2
    assert len({request.prompt_tokens for request in requests}) > 20
    assert len(replay.parents) > 10_000


def test_probabilities_are_true_on_rounds_that_were_not_learnt_from(recording) -> None:
    everyone = np.ones(recording.num_requests, np.bool_)
    policy = calibration.Judged(
        recording, LearntCalibration(), teaches=everyone, judges=everyone
    )
    calibration.replay(recording, policy)
    raw, calibrated, correct, requests = map(
        np.concatenate, zip(*policy.seen, strict=True)
    )
    assert len(correct) >= 20_000
    assert len(np.unique(requests)) == recording.num_requests
    before, after = (
        calibration.errors(probs.astype(np.float64), correct, requests, resamples=100)
        for probs in (raw, calibrated)
    )
    assert before["ece"] < 0.05, "else it would have to be halved"
    assert after["ece"] < min(before["ece"], 0.03)
    assert after["ece_interval"][1] < 0.03
    assert after["brier"] < before["brier"]


def test_trees_find_more_correct_drafts_than_the_papers_rule_on_chains(
    recording,
) -> None:
    table = CostTable(token_knots=(1, 2), knot_times_s=(0.01, 0.02))
    rows = compare_budgets(
        recording,
        table,
        (1, 2),
        16,
        make_calibrator=LearntCalibration,
        effort=Effort(least_rounds=1000, most_rounds=1000),
    )
    gains = {(row["budget"], row["policy"]): row["over_paper"] for row in rows}
    # With one draft per request nearly all that are worth it are on the chain.
    assert gains[1, "ours-1x-trees"] > 0.01
    assert gains[2, "ours-2x-trees"] > 0.10
    for row in rows:
        if row["policy"].startswith("ours"):
            assert 0 < row["closed"] < 1
