"""Laps measure what ran between them, and nothing else."""

import pytest

pytest.importorskip("sglang")

from sglang_tetris.adapter import round_clock
from sglang_tetris.adapter.round_clock import DeviceClock, RoundClock
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
    clock = RoundClock()
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
    clock = RoundClock()
    clock.start()
    wait(1)
    clock.lap("draft_extend", LOAD, tokens=0)
    wait(2)
    clock.lap("verify", LOAD, tokens=3)
    assert times(clock) == {"verify": 2}


def test_an_interrupted_gap_is_left_out(wait) -> None:
    clock = RoundClock()
    clock.start()
    clock.end(LOAD)
    clock.start_prompts()
    wait(60)
    clock.start()
    assert times(clock) == {}


def test_prompt_steps_are_laps_and_part_of_no_gap(wait) -> None:
    clock = RoundClock()
    clock.start()
    wait(1)
    clock.end(LOAD)
    wait(7)
    clock.start_prompts()
    wait(2)
    clock.lap("prompt", LOAD, tokens=40)
    wait(3)
    clock.lap("draft_extend", LOAD, tokens=40)
    wait(7)
    clock.start()
    assert times(clock) == {"prompt": 2, "draft_extend": 3}
    wait(1)
    clock.lap("verify", LOAD, tokens=3)
    clock.end(LOAD)
    wait(0.5)
    clock.start()
    assert times(clock) == {"verify": 1, "outside": 0.5}


class Device:
    """Works through what it was given, in order, while the host goes on."""

    def __init__(self, wait) -> None:
        self.wait, self.host_s, self.free_s = wait, 0.0, 0.0

    def launch(self, device_s: float, host_s: float = 0.1) -> None:
        """The host takes host_s to launch what takes the device device_s."""
        self.spend(host_s)
        self.free_s = max(self.free_s, self.host_s) + device_s

    def spend(self, host_s: float) -> None:
        self.wait(host_s)
        self.host_s += host_s

    def synchronise(self) -> None:
        self.spend(max(self.free_s - self.host_s, 0.0))

    def event(self, enable_timing: bool) -> "Event":
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self) -> None:
        self.at_s = max(self.device.free_s, self.device.host_s)

    def query(self) -> bool:
        return self.at_s <= self.device.host_s

    def elapsed_time(self, other: "Event") -> float:
        return 1000.0 * (other.at_s - self.at_s)


@pytest.fixture
def device(wait, monkeypatch) -> Device:
    found = Device(wait)
    monkeypatch.setattr(round_clock.torch.cuda, "Event", found.event)
    return found


def device_round(clock: DeviceClock, device: Device) -> dict[str, float]:
    """Draft steps of 2 x 3 s, a verify of 5, sampling of 0.5, an extend of 4."""
    clock.start()
    device.launch(6)
    clock.lap("draft_step", LOAD, tokens=3, times=2)
    device.launch(5)
    clock.lap("verify", LOAD, tokens=8)
    device.launch(0.5)
    clock.lap("sample_greedy", LOAD, tokens=8)
    device.synchronise()
    found = times(clock)
    clock.skip()
    device.launch(4)
    clock.lap("draft_extend", LOAD, tokens=4)
    clock.end(LOAD)
    return found


def test_a_device_beside_the_host_says_itself_what_its_parts_took(device) -> None:
    clock = DeviceClock()
    parts = {"draft_step": 3, "verify": 5, "sample_greedy": 0.5}
    device_round(clock, device)
    device.spend(1)  # the scheduler, while the device still extends
    found = device_round(clock, device)
    # The device waited for no launch but that of the extend, the first after a wait.
    assert found == parts | {"draft_extend": pytest.approx(4.1)}
    device.spend(9)  # longer than the extend: the device has nothing to do
    found = device_round(clock, device)
    # 9.1 s on the host less 4.1 s of the extend.
    assert found.pop("outside") == pytest.approx(5)
    # The first launch of the round is part of the draft steps.
    assert found.pop("draft_step") == pytest.approx(3.05)
    assert found == {
        "verify": 5,
        "sample_greedy": 0.5,
        "draft_extend": pytest.approx(4.1),
    }


def test_prompts_on_a_device_are_laps_and_part_of_no_gap(device) -> None:
    clock = DeviceClock()
    device_round(clock, device)
    device.spend(3)
    clock.start_prompts()
    device.launch(20)
    clock.lap("prompt", LOAD, tokens=40)
    device.launch(2)
    clock.lap("draft_extend", LOAD, tokens=40)
    device.spend(70)
    clock.start()
    device.launch(5)
    clock.lap("decode", LOAD, tokens=3)
    assert times(clock)["prompt"] == pytest.approx(20, abs=0.2)
    device.synchronise()
    found = times(clock)
    assert found["decode"] == pytest.approx(5, abs=0.2), "now that it has ended"
    assert "outside" not in found


def test_a_gap_with_prompts_in_it_is_not_measured_on_a_device(device) -> None:
    clock = DeviceClock()
    device_round(clock, device)
    clock.start_prompts()
    device.launch(20)
    clock.lap("prompt", LOAD, tokens=40)
    device.spend(70)
    assert set(device_round(clock, device)) == {
        *("draft_extend", "prompt", "draft_step", "verify", "sample_greedy")
    }
    device.spend(70)
    assert "outside" in device_round(clock, device)
