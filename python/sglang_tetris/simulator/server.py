"""One simulated server: its running requests, and how a round moves them on.

A request replays a recorded one from its first position to its last. A round at row i
that accepts a drafts goes on at row i + a + 1. A request that begins has its prompt
read before the next round, in one step with all others that begin then; the draft reads
along where the last plan said so. What it has not read of a request's text (`unread`)
it reads when the request next drafts, but no more than the last `KEPT_TOKENS`.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sglang_tetris.core.round_cost import Load, Sampling
from sglang_tetris.core.round_plan import RoundPlan
from sglang_tetris.simulator.clock import Clock, noisy, total_s
from sglang_tetris.simulator.forests import Bools, Ints, Recording
from sglang_tetris.simulator.policies.base import FinishedRound, Policy
from sglang_tetris.simulator.totals import RoundTotals
from sglang_tetris.simulator.trees import Choice, RoundTrees

# What a worker keeps of each request for its draft to catch up on.
KEPT_TOKENS = 64


class Server:
    """A server with one policy; `now` is its own time in seconds.

    capacity  requests that run at once; others wait
    """

    def __init__(
        self,
        recording: Recording,
        clock: Clock,
        policy: Policy,
        *,
        capacity: int,
        rng: np.random.Generator,
    ) -> None:
        self._recording, self._clock, self.policy = recording, clock, policy
        self._capacity, self._rng = capacity, rng
        self.now = 0.0
        self.totals = RoundTotals()
        self._turn, self._reads_along = 0, policy.drafts
        self._waiting: list[tuple[int, int]] = []
        none = np.zeros(0, np.int64)
        # A column per running request: arrival number, row, last row + 1, text, unread.
        self._running: Ints = np.stack([none] * 5)
        self._class: Ints = none

    @property
    def num_requests(self) -> int:
        """Running and waiting."""
        return len(self._class) + len(self._waiting)

    def accept(self, number: int, request: int, *, skipped: int = 0) -> None:
        """Queue a recorded request under the arrival's number.

        skipped  tokens that count as emitted before the simulation began
        """
        row = int(self._recording.row_starts[request]) + skipped
        self._waiting.append((number, row))

    def run_round(self) -> Sequence[int]:
        """Run prompts that wait, then one round; return the arrivals that finished."""
        self._begin_waiting()
        numbers, rows, ends, text, unread = self._running
        load = self._load(text)
        if self.policy.foresees:
            self.policy.foresee(
                lambda topk: self._recording.forest(topk).num_correct[rows],
                int(unread.sum()),
            )
        plan = self.policy.plan(load)
        self._reads_along = self.policy.drafts and plan.reads_prompts
        emitted = np.ones(load.batch_size, np.int64)
        trees, num_correct, num_drafts = None, 0, 0
        choice: Choice = 0
        if plan.depth == 0:
            parts = self._clock.undrafted(load)
        else:
            who = self._drafting(plan, load.batch_size)
            trees = RoundTrees(
                self._recording,
                self.policy.topk,
                rows[who],
                plan.depth,
                self._class[who],
            )
            choice = self.policy.choose(plan, load, trees)
            correct = trees.num_correct(choice)
            emitted[who] += correct
            num_correct, num_drafts = int(correct.sum()), trees.num_chosen(choice)
            parts = self._clock.drafted(
                load,
                depth=plan.depth,
                topk=self.policy.topk,
                num_drafting=trees.num_requests,
                extended=int(unread[who].sum()),
                num_drafts=num_drafts,
                num_correct=num_correct,
            )
            unread[who] = 0
        finished = FinishedRound(
            plan=plan,
            load=load,
            trees=trees,
            choice=choice,
            num_drafts=num_drafts,
            num_correct=num_correct,
            parts=parts,
        )
        self._account(finished)
        rows += emitted
        text += emitted
        np.minimum(unread + emitted, KEPT_TOKENS, out=unread)
        return self._end(numbers, rows >= ends)

    def _account(self, finished: FinishedRound) -> None:
        """Let the round's time pass, count it, and tell the policy."""
        self.now += total_s(finished.parts)
        self.totals.add(finished)
        if self.policy.listens:
            parts = noisy(finished.parts, self._rng)
            self.policy.observe(replace(finished, parts=parts))

    def _end(self, numbers: Ints, done: Bools) -> Sequence[int]:
        """Take the requests that are done out of the batch; return their arrivals."""
        if not done.any():
            return ()
        ended: Sequence[int] = numbers[done].tolist()
        self._running = self._running[:, ~done]
        self._class = self._class[~done]
        return ended

    def _drafting(self, plan: RoundPlan, running: int) -> Ints:
        """Return which requests draft; not always the same ones, where some do."""
        most = running if plan.num_drafting is None else plan.num_drafting
        if most >= running:
            return np.arange(running)
        self._turn += most
        return (self._turn + np.arange(most)) % running

    def _load(self, text: Ints) -> Load:
        sampling: Sampling = "multinomial" if self._class.any() else "greedy"
        return Load(
            batch_size=len(text),
            num_drafting=len(text) if self.policy.drafts else 0,
            total_kv_tokens=int(text.sum()),
            sampling=sampling,
        )

    def _begin_waiting(self) -> None:
        """Read the prompts of the requests that there is room for."""
        room = self._capacity - self._running.shape[1]
        if not self._waiting or room <= 0:
            return
        begun, self._waiting = self._waiting[:room], self._waiting[room:]
        recording = self._recording
        numbers, rows = np.array(begun, np.int64).T
        requests = np.searchsorted(recording.row_starts, rows, side="right") - 1
        text = recording.prompt_tokens[requests] + rows - recording.row_starts[requests]
        prompts = int(recording.prompt_tokens[requests].sum())
        size = len(begun)
        load = Load(batch_size=size, num_drafting=size, total_kv_tokens=prompts)
        steps = [("prompt", prompts, 1)]
        unread = np.full(size, KEPT_TOKENS)
        if self._reads_along:
            steps.append(("draft_extend", prompts, 1))
            unread[:] = 1
        parts = self._clock.parts(load, *steps)
        if self.policy.listens:
            self.policy.observe_prompts(prompts, noisy(parts, self._rng))
        time_s = total_s(parts)
        self.now += time_s
        self.totals.add_prompts(time_s)
        ends = recording.row_starts[requests + 1]
        columns = np.stack([numbers, rows, ends, text, unread])
        self._running = np.concatenate([self._running, columns], 1)
        self._class = np.concatenate([self._class, recording.sampling_class[requests]])
