"""Arrivals and routers: who runs where, and when a simulation ends."""

import numpy as np
import pytest

from sglang_tetris.simulator.clock import Clock
from sglang_tetris.simulator.driver import Arrivals, run
from sglang_tetris.simulator.policies.fixed import NoSpeculation
from sglang_tetris.simulator.server import Server
from tests.unit.simulator.worlds import TABLE, chain, recorded


class Watched(NoSpeculation):
    """Plain decoding that keeps the batch sizes."""

    listens = True

    def __init__(self) -> None:
        super().__init__("watched")
        self.sizes: list[int] = []

    def observe(self, finished) -> None:
        self.sizes.append(finished.load.batch_size)


def servers(recording, count: int, capacity: int = 99) -> list[Server]:
    rng = np.random.default_rng(0)
    clock = Clock(TABLE)
    return [
        Server(recording, clock, Watched(), capacity=capacity, rng=rng)
        for _ in range(count)
    ]


def go(recording, made: list[Server], arrivals: Arrivals, *, rounds: int = 300, **more):
    return run(
        recording, made, arrivals, min_rounds=rounds, min_tokens=0, seed=1, **more
    )


def test_a_closed_loop_keeps_so_many_in_flight(recording):
    made = servers(recording, 1)
    outcome = go(recording, made, Arrivals(concurrency=12))
    assert set(made[0].policy.sizes) == {12}
    assert len(outcome.latencies_s) > 12
    # 12 tokens in a round of 1 + 10 + 12 ms, less what prompts take.
    assert 0.6 * 12 / 23e-3 < outcome.tokens_per_s < 12 / 23e-3


def test_the_warm_up_is_counted_apart(recording):
    made = servers(recording, 1)
    outcome = go(recording, made, Arrivals(concurrency=4), rounds=50)
    totals = outcome.totals[0]
    assert totals.warm_up.num_rounds == 200
    assert totals.steady.num_rounds == 50
    assert totals.steady.num_tokens == 200
    assert outcome.tokens_per_s_from_start != outcome.tokens_per_s


def test_requests_are_the_same_for_every_policy_and_each_comes_once_a_pass(tmp_path):
    """Requests of 1 to 6 tokens: a pass of all of them is 21 tokens, in any order."""
    found = recorded(
        tmp_path, *[[chain(0.9, correct=0)] * length for length in range(1, 7)]
    )
    outcomes = [
        go(found, servers(found, 1), Arrivals(concurrency=1), rounds=100)
        for _ in range(2)
    ]
    assert outcomes[0].latencies_s == outcomes[1].latencies_s
    lengths = np.round((np.array(outcomes[0].latencies_s) - 7e-3) / 12e-3)
    assert sorted(lengths[6:12]) == sorted(lengths[12:18]) == [1, 2, 3, 4, 5, 6]


def test_an_open_loop_follows_its_rate_and_its_capacity(recording):
    slow, fast = servers(recording, 1, capacity=8), servers(recording, 1, capacity=8)
    # A request of 65 tokens alone takes 65 rounds of 12 ms: 0.8 seconds.
    go(recording, slow, Arrivals(rate=0.2))
    assert np.mean(slow[0].policy.sizes) < 2
    go(recording, fast, Arrivals(rate=200.0))
    assert max(fast[0].policy.sizes) == 8
    assert np.mean(fast[0].policy.sizes) > 7


def test_idle_time_passes_but_is_nobodys_speed(recording):
    made = servers(recording, 1)
    outcome = go(recording, made, Arrivals(rate=0.01), rounds=100)
    spans = (made[0].totals.warm_up, made[0].totals.steady)
    busy = sum(span.round_s + span.prompt_s for span in spans)
    assert made[0].now > 10 * busy
    assert outcome.tokens_per_s > 60


@pytest.mark.parametrize("router", ["round-robin", "least-loaded"])
def test_replicas_share_the_load(recording, router):
    made = servers(recording, 3)
    go(recording, made, Arrivals(concurrency=12), router=router)
    means = [float(np.mean(server.policy.sizes)) for server in made]
    assert sum(means) == pytest.approx(12, abs=0.5)
    assert min(means) > 2


def test_the_least_loaded_router_evens_out_what_turns_do_not(tmp_path):
    """Long and short requests in turn: by turns, one server gets all the long ones."""
    text = [chain(0.9, correct=0)]
    found = recorded(tmp_path, text * 2, text * 200)
    spread = {}
    for router in ("round-robin", "least-loaded"):
        made = servers(found, 2)
        go(found, made, Arrivals(concurrency=8), router=router, rounds=400)
        sizes = [float(np.mean(server.policy.sizes)) for server in made]
        spread[router] = max(sizes) - min(sizes)
    assert spread["least-loaded"] < 1
    assert spread["least-loaded"] < spread["round-robin"]


@pytest.mark.parametrize("wrong", [{}, {"concurrency": 4, "rate": 1.0}])
def test_arrivals_are_of_one_kind(wrong):
    with pytest.raises(ValueError, match="exactly one"):
        Arrivals(**wrong)
