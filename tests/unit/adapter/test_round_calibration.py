"""The server's calibration learns from rounds, and outlives it in a file."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang")

from sglang_tetris.adapter import calibration
from sglang_tetris.adapter.calibration import RoundCalibration, read_calibration
from sglang_tetris.adapter.round_record import RoundRecord
from sglang_tetris.core import Calibrator, sampling_class
from sglang_tetris.core.config import TetrisConfig
from sglang_tetris.core.errors import TetrisConfigError
from tests.reference.forests import trees_of
from tests.unit.adapter.records import finished

GREEDY = sampling_class(0.0, transformed=False)
WARM = sampling_class(0.7, transformed=False)
# The draft is sure of request 0's chain, and not of request 1's.
TREES = trees_of([(1, -1, 0.9), (2, 0, 0.9)], [(3, -1, 0.3), (4, 0, 0.3)])
# Request 0's drafts are wrong, request 1's are right.
TOKENS = [9, 9, 9, 3, 4, 9]


def done(cut_short: tuple[int, ...] = (), classes=(GREEDY, GREEDY)) -> RoundRecord:
    record = finished(TREES, TOKENS, budget=4, cut_short=cut_short)
    settings = [
        dataclasses.replace(own, sampling_class=group)
        for own, group in zip(record.view.settings, classes, strict=True)
    ]
    return dataclasses.replace(
        record, view=dataclasses.replace(record.view, settings=settings)
    )


def configured(path: Path | None = None, **settings: bool) -> TetrisConfig:
    where = None if path is None else str(path)
    return TetrisConfig(calibration_path=where, **settings)


def probs(found: RoundCalibration, record: RoundRecord | None = None) -> torch.Tensor:
    view = (record or done()).view
    return found.calibrated(TREES, view).accept_probs


def taught(found: RoundCalibration, rounds: int, **how) -> RoundCalibration:
    for _ in range(rounds):
        found.learn(done(**how))
    return found


def test_it_starts_from_the_drafts_own_probabilities() -> None:
    found = RoundCalibration(configured(), saves=True)
    torch.testing.assert_close(probs(found), TREES.accept_probs)
    assert found.describe()["num_rounds"] == 0


def test_it_follows_what_was_correct() -> None:
    """Of request 0 the first draft was wrong each time, of request 1 none was."""
    found = taught(RoundCalibration(configured(), saves=False), 100)
    after = probs(found)
    assert after[0, 0] < 0.6, "0.9 was too much"
    # Maps are monotone: of first drafts 0.3 cannot be more than 0.9 is.
    assert after[1, 0] > 0.4, "0.3 was too little"
    assert after[1, 1] > 0.6, "and more so in the second place"
    described = found.describe()
    assert described["num_rounds"] == 100
    greedy = described["classes"]["greedy"]
    # Of the three that had a label two were correct: below a wrong draft is none.
    assert greedy["accept_rate"] == pytest.approx(2 / 3)
    assert greedy["raw_mean"] == pytest.approx((0.9 + 0.3 + 0.3) / 3)


def test_a_request_is_calibrated_and_taught_by_its_own_kind_of_sampling() -> None:
    record = done(classes=(WARM, GREEDY))
    found = RoundCalibration(configured(), saves=False)
    for _ in range(100):
        found.learn(record)
    assert set(found.describe()["classes"]) == {"greedy", "temperature_to_0.9"}
    # Greedy drafts of 0.9 were never seen, warm ones were always wrong.
    assert probs(found, record)[0, 0] < 0.3
    swapped = probs(found, done(classes=(GREEDY, WARM)))
    assert swapped[0, 0] > 0.6
    assert swapped[1, 0] < 0.3


def test_it_learns_from_the_drafts_probabilities_not_from_calibrated_ones() -> None:
    """What it said itself would teach it that it is right."""
    record = done()
    believed = TREES.with_accept_probs(torch.full((2, 2), 0.5))
    plain = RoundCalibration(configured(), saves=False)
    other = RoundCalibration(configured(), saves=False)
    plain.learn(record)
    other.learn(dataclasses.replace(record, trees=believed))
    assert other.describe() == plain.describe()
    assert torch.equal(probs(other), probs(plain))


@pytest.mark.parametrize(("cut", "taught_by"), [((0,), 1), ((1,), 0)])
def test_a_request_that_was_cut_short_teaches_nothing(
    cut: tuple[int, ...], taught_by: int
) -> None:
    """The children of its last row were not compared: they are not wrong."""
    found = taught(RoundCalibration(configured(), saves=False), 5, cut_short=cut)
    wanted = Calibrator()
    labels = {
        0: ([0.9], [1], [0], [GREEDY], [False]),
        1: ([0.3, 0.3], [1, 2], [0, 0], [GREEDY] * 2, [True, True]),
    }[taught_by]
    for _ in range(5):
        wanted.update(*labels)
    assert found.describe()["classes"]["greedy"] == pytest.approx(
        wanted.describe()["classes"]["greedy"]
    )


def test_rounds_in_which_all_were_cut_short_change_nothing() -> None:
    found = taught(RoundCalibration(configured(), saves=False), 5, cut_short=(0, 1))
    assert found.describe()["num_rounds"] == 0
    torch.testing.assert_close(probs(found), TREES.accept_probs)


def test_rounds_without_drafts_teach_nothing() -> None:
    found = RoundCalibration(configured(), saves=False)
    nothing = finished(trees_of([], []), [9, 9], budget=0)
    found.learn(nothing)
    assert found.describe()["num_rounds"] == 0
    assert found.calibrated(nothing.trees, nothing.view) is nothing.trees


def test_switched_off_it_changes_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(calibration, "_SAVE_EVERY", 1)
    path = tmp_path / "calibration.json"
    saved = taught(RoundCalibration(configured(path), saves=True), 1)
    assert saved.describe()["num_rounds"] == 1
    before = path.read_text()
    found = RoundCalibration(configured(path, calibration=False), saves=True)
    taught(found, 50)
    assert found.calibrated(TREES, done().view) is TREES
    assert found.describe() is None
    assert path.read_text() == before


def test_a_server_goes_on_from_what_another_saved(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(calibration, "_SAVE_EVERY", 3)
    path = tmp_path / "calibration.json"
    saved = RoundCalibration(configured(path), saves=True)
    assert taught(saved, 2).describe()["num_rounds"] == 2
    assert not path.exists(), "now and then, not in every round"
    taught(saved, 1)
    loaded = RoundCalibration(configured(path), saves=False)
    assert loaded.describe() == saved.describe()
    assert torch.equal(probs(loaded), probs(saved))
    assert not torch.equal(probs(loaded), TREES.accept_probs)
    # And both learn on alike: the sums behind the maps are the same.
    taught(saved, 7)
    taught(loaded, 7)
    assert loaded.describe() == saved.describe()
    assert torch.equal(probs(loaded), probs(saved))
    assert read_calibration(str(path)).describe()["num_rounds"] == 9
    assert list(tmp_path.iterdir()) == [path], "no half-written file stays"


def test_rounds_that_taught_nothing_do_not_bring_the_next_saving_nearer(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(calibration, "_SAVE_EVERY", 2)
    path = tmp_path / "calibration.json"
    found = RoundCalibration(configured(path), saves=True)
    for _ in range(5):
        found.learn(finished(trees_of([], []), [9, 9], budget=0))
    taught(found, 1)
    assert not path.exists()


def test_only_the_rank_that_saves_writes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(calibration, "_SAVE_EVERY", 1)
    path = tmp_path / "calibration.json"
    taught(RoundCalibration(configured(path), saves=False), 3)
    assert not path.exists()


def test_a_full_disk_stops_saving_but_not_learning(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(calibration, "_SAVE_EVERY", 1)
    path = tmp_path / "gone" / "calibration.json"
    found = taught(RoundCalibration(configured(path), saves=True), 4)
    assert found.describe()["num_rounds"] == 4
    assert caplog.text.count("not saved any more") == 1, "it is said once"


def test_what_a_crash_left_half_written_is_not_read(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(calibration, "_SAVE_EVERY", 1)
    path = tmp_path / "calibration.json"
    taught(RoundCalibration(configured(path), saves=True), 2)
    part = tmp_path / "calibration.json.part"
    part.write_text('{"format": ')
    found = RoundCalibration(configured(path), saves=True)
    assert found.describe()["num_rounds"] == 2
    taught(found, 1)
    assert not part.exists()
    assert read_calibration(str(path)).describe()["num_rounds"] == 3


def stale(fields: dict) -> dict:
    return fields | {"format": "sglang_tetris.calibration/0"}


def fewer_knots(fields: dict) -> dict:
    del fields["classes"]["greedy"]["sums"][0][0][0][-1]
    return fields


def unknown_class(fields: dict) -> dict:
    return fields | {"classes": {"lukewarm": fields["classes"]["greedy"]}}


@pytest.mark.parametrize(
    "change", [stale, fewer_knots, unknown_class], ids=lambda change: change.__name__
)
def test_a_file_of_another_release_is_refused(change, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(calibration, "_SAVE_EVERY", 1)
    path = tmp_path / "calibration.json"
    taught(RoundCalibration(configured(path), saves=True), 1)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    before = path.read_text()
    with pytest.raises(TetrisConfigError, match=r"calibration_path must be a saved"):
        RoundCalibration(configured(path), saves=True)
    assert path.read_text() == before, "the user's file is left alone"
    # Who does not calibrate need not mend it.
    RoundCalibration(configured(path, calibration=False), saves=True)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe\x00"])
def test_an_unreadable_file_is_refused_in_one_sentence(content, tmp_path) -> None:
    path = tmp_path / "calibration.json"
    path.write_bytes(content)
    with pytest.raises(TetrisConfigError, match="calibration_path") as refused:
        RoundCalibration(configured(path), saves=True)
    assert "\n" not in str(refused.value)
    with pytest.raises(TetrisConfigError, match="calibration_path"):
        RoundCalibration(configured(tmp_path), saves=True)


def test_a_path_without_a_file_begins_anew(tmp_path) -> None:
    found = RoundCalibration(configured(tmp_path / "new.json"), saves=True)
    torch.testing.assert_close(probs(found), TREES.accept_probs)


def test_all_ranks_start_from_rank_0s_file(tmp_path) -> None:
    path = tmp_path / "calibration.json"
    saved = taught(RoundCalibration(configured(path), saves=True), 300)
    of_rank_0 = path.read_text()
    path.unlink()
    found = RoundCalibration(configured(path), saves=False, share=lambda own: of_rank_0)
    assert found.describe()["num_rounds"] > 0
    assert probs(found)[0, 0] < 0.5 < TREES.accept_probs[0, 0]
    torch.testing.assert_close(probs(found), probs(saved), atol=0.05, rtol=0)
