"""Laps measure what ran between them, and nothing else."""

import pytest

pytest.importorskip("sglang")

from sglang_tetris.adapter import round_clock
from sglang_tetris.adapter.round_clock import RoundClock
from sglang_tetris.core.auto_policy import Load

LOAD = Load(batch_size=3, num_drafting=3, total_kv_tokens=30)


@pytest.fixture
def wait(monkeypatch):
    """Return a function that lets time pass."""
    now = [100.0]
    monkeypatch.setattr(round_clock.time, "perf_counter", lambda: now[0])

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    return pass_by


def times(clock: RoundClock) -> dict[str, float]:
    return {lap.phase: pytest.approx(lap.time_s) for lap in clock.take()}


def test_laps_and_what_lies_between_rounds(wait) -> None:
    clock = RoundClock(waits=False)
    clock.start()
    wait(4)
    clock.lap("draft_step", LOAD, tokens=3, times=2)
    wait(5)
    clock.lap("verify", LOAD, tokens=8)
    wait(0.5)  # belongs to no part
    assert times(clock) == {"draft_step": 2, "verify": 5}
    wait(0.25)
    clock.end(LOAD)
    wait(1)
    clock.start()
    assert times(clock) == {"outside": 1.75}


def test_a_part_without_rows_is_no_sample(wait) -> None:
    clock = RoundClock(waits=False)
    clock.start()
    wait(1)
    clock.lap("draft_extend", LOAD, tokens=0)
    wait(2)
    clock.lap("verify", LOAD, tokens=3)
    assert times(clock) == {"verify": 2}


def test_an_interrupted_gap_is_left_out(wait) -> None:
    clock = RoundClock(waits=False)
    clock.start()
    clock.end(LOAD)
    clock.interrupted()
    wait(60)
    clock.start()
    assert times(clock) == {}


def test_a_device_beside_the_host_is_timed_when_the_host_waits_for_it(wait) -> None:
    clock = RoundClock(waits=True)
    clock.start()
    wait(0.1)  # only the launch
    clock.lap("decode", LOAD, tokens=3)
    wait(2)
    clock.lap("sample_greedy", LOAD, tokens=3)
    (lap,) = clock.take()
    assert (lap.phase, lap.tokens) == ("decode", 3)
    assert lap.time_s == pytest.approx(2.1)


def test_prompt_steps_are_laps_and_part_of_no_gap(wait) -> None:
    clock = RoundClock(waits=False)
    clock.start()
    wait(1)
    clock.end(LOAD)
    wait(7)
    clock.start_prompts()
    wait(2)
    clock.lap_prompts("prompt", LOAD, tokens=40)
    wait(3)
    clock.lap_prompts("draft_extend", LOAD, tokens=40)
    wait(7)
    clock.start()
    assert times(clock) == {"prompt": 2, "draft_extend": 3}
    wait(1)
    clock.lap("verify", LOAD, tokens=3)
    clock.end(LOAD)
    wait(0.5)
    clock.start()
    assert times(clock) == {"verify": 1, "outside": 0.5}


class Event:
    """An event of a device that has reached the second one by now."""

    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.recorded += 1
        self.place = Event.recorded

    def query(self) -> bool:
        return self.place <= 2

    def elapsed_time(self, other: "Event") -> float:
        return 1000.0 * (other.place - self.place)


def test_a_device_beside_the_host_says_itself_what_prompts_took(
    wait, monkeypatch
) -> None:
    monkeypatch.setattr(round_clock.torch.cuda, "Event", Event)
    clock = RoundClock(waits=True)
    clock.start_prompts()
    clock.lap_prompts("prompt", LOAD, tokens=40)
    clock.lap_prompts("draft_extend", LOAD, tokens=40)
    assert clock.take() == [], "the host does not wait for it"
    clock.start()
    # The second part had not ended by then: it is left out.
    assert times(clock) == {"prompt": 1.0}
    clock.start()
    assert times(clock) == {}
