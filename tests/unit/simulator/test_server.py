"""A request is replayed exactly: a round that accepts a drafts emits a + 1 tokens."""

import numpy as np
import pytest

from sglang_tetris.core.round_plan import RoundPlan
from sglang_tetris.simulator.clock import Clock
from sglang_tetris.simulator.policies.base import Policy
from sglang_tetris.simulator.policies.fixed import FixedChain, NoSpeculation
from sglang_tetris.simulator.server import KEPT_TOKENS, Server
from tests.unit.simulator.worlds import TABLE, chain, recorded


class Recorder(Policy):
    """Drafts as it is told, and keeps what it was told of each round."""

    listens = True

    def __init__(self, *depths: int, num_drafting: int | None = None) -> None:
        super().__init__("recorder")
        self.depths, self.rounds, self.prompts = list(depths), [], []
        self.num_drafting = num_drafting

    def plan(self, load):
        depth = self.depths.pop(0) if self.depths else 0
        return RoundPlan(
            depth=depth, num_drafting=self.num_drafting, reads_prompts=depth > 0
        )

    def choose(self, plan, load, trees):
        return plan.depth

    def observe(self, finished):
        self.rounds.append(finished)

    def observe_prompts(self, num_tokens, parts):
        self.prompts.append((num_tokens, [part.phase for part in parts]))


def server(recording, policy: Policy, capacity: int = 99) -> Server:
    rng = np.random.default_rng(0)
    return Server(recording, Clock(TABLE), policy, capacity=capacity, rng=rng)


def rows(policy: Recorder, phase: str) -> list[int]:
    """The rows of a phase, round by round; 0 where it did not run."""
    return [
        sum(part.tokens for part in finished.parts if part.phase == phase)
        for finished in policy.rounds
    ]


def test_rounds_follow_the_recorded_text(tmp_path):
    """Accepting 2, 0 and 1 drafts leads from row 0 to 3, to 4, to the end at 6."""
    text = [chain(0.9, 0.9, 0.9, correct=n) for n in (2, 3, 3, 0, 1, 3)]
    found = recorded(tmp_path, text)
    policy = Recorder(3, 3, 3)
    running = server(found, policy)
    running.accept(7, 0)
    assert [list(running.run_round()) for _ in range(3)] == [[], [], [7]]
    assert [finished.num_correct for finished in policy.rounds] == [2, 0, 1]
    assert running.totals.warm_up.num_tokens == 6
    assert running.num_requests == 0


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_every_policy_emits_the_same_text(recording, depth):
    """All tokens of all requests, whatever is drafted, and not one more."""
    policy = FixedChain("fixed", depth) if depth else NoSpeculation("none")
    running = server(recording, policy)
    for number in range(recording.num_requests):
        running.accept(number, number)
    ended: list[int] = []
    while running.num_requests:
        ended += running.run_round()
    totals = running.totals.warm_up
    assert totals.num_tokens == recording.num_tokens
    assert sorted(ended) == list(range(recording.num_requests))
    assert (totals.num_correct > 0) is (depth > 0)


def test_time_is_the_rounds_and_the_prompts(tmp_path):
    found = recorded(tmp_path, [chain(0.9, correct=0)] * 3)
    running = server(found, NoSpeculation("none"))
    running.accept(0, 0)
    running.run_round()
    # A prompt step of 7 ms, outside 1 ms, decode 10 + 1 ms.
    assert running.now == pytest.approx(19e-3)
    running.run_round()
    assert running.now == pytest.approx(31e-3)
    assert running.totals.warm_up.prompt_s == pytest.approx(7e-3)


def test_the_draft_reads_what_it_has_missed_but_no_more_than_is_kept(tmp_path):
    found = recorded(tmp_path, [chain(0.9, correct=0)] * (KEPT_TOKENS + 20))
    policy = Recorder(1, 1, 0, 0, 1, *[0] * (KEPT_TOKENS + 5), 1)
    running = server(found, policy)
    running.accept(0, 0)
    while running.num_requests:
        running.run_round()
    read = rows(policy, "draft_extend")
    assert read[:5] == [1, 1, 0, 0, 3]
    assert read[5 + KEPT_TOKENS + 5] == KEPT_TOKENS


def test_prompts_are_read_together_and_by_the_draft_where_the_plan_says_so(tmp_path):
    found = recorded(tmp_path, *[[chain(0.9, correct=0)] * 9] * 4)
    policy = Recorder(1, 1, 0, 1)
    running = server(found, policy)
    running.accept(0, 0)
    running.accept(1, 1)
    running.run_round()
    running.accept(2, 2)
    running.run_round()
    assert policy.prompts == [
        (20, ["prompt", "draft_extend"]),
        (10, ["prompt", "draft_extend"]),
    ]
    assert rows(policy, "draft_extend")[1] == 3, "one new token each"
    running.run_round()
    running.accept(3, 3)
    running.run_round()
    assert policy.prompts[2] == (10, ["prompt"]), "nothing was drafted"
    assert rows(policy, "draft_extend")[3] == 3 * 2 + KEPT_TOKENS


def test_no_more_run_than_there_is_room_for(tmp_path):
    found = recorded(tmp_path, *[[chain(0.9, correct=0)] * 2] * 3)
    policy = Recorder()
    running = server(found, policy, capacity=2)
    for number in range(3):
        running.accept(number, number)
    running.run_round()
    assert policy.rounds[0].load.batch_size == 2
    assert running.num_requests == 3
    running.run_round()
    running.run_round()
    assert policy.rounds[2].load.batch_size == 1


def test_where_some_draft_it_is_not_always_the_same_ones(tmp_path):
    good, bad = [chain(0.9, correct=1)] * 9, [chain(0.9, correct=0)] * 9
    found = recorded(tmp_path, good, bad)
    policy = Recorder(*[1] * 4, num_drafting=1)
    running = server(found, policy)
    running.accept(0, 0)
    running.accept(1, 1)
    for _ in range(4):
        running.run_round()
    assert sorted(finished.num_correct for finished in policy.rounds) == [0, 0, 1, 1]
    assert {finished.trees.num_requests for finished in policy.rounds} == {1}


def test_policies_are_told_noisy_times_and_the_clock_runs_on_true_ones(tmp_path):
    found = recorded(tmp_path, [chain(0.9, correct=0)] * 9)
    policy = Recorder()
    running = server(found, policy)
    running.accept(0, 0)
    for _ in range(9):
        running.run_round()
    told = [finished.parts[1].time_s for finished in policy.rounds]
    assert len(set(told)) == 9
    # The first prompt is read by the draft too, in 2 ms.
    assert running.now == pytest.approx(7e-3 + 2e-3 + 9 * 12e-3)


def test_a_batch_is_greedy_if_all_of_it_is(recording):
    policy = Recorder()
    running = server(recording, policy)
    running.accept(0, 0)  # sampling class 0
    running.run_round()
    running.accept(1, 4)  # sampling class 2
    running.run_round()
    assert [finished.load.sampling for finished in policy.rounds] == [
        "greedy",
        "multinomial",
    ]
