"""Counts what was proposed, verified and correct, per request and for the server.

Both levels are counted from the same host numbers at the same moment, so the requests'
counts always add up to the server's. A request's counts hang on SGLang's `Req`, which
leaves with the request.

accept rate = correct drafts / verified drafts; accept length = tokens per round, bonus
token included; trimmed = proposed - verified.
"""

import logging
from typing import Any

from sglang_tetris.adapter.round_record import RoundRecord
from sglang_tetris.core.metrics import DraftCounters, count_round

logger = logging.getLogger(__name__)

META_KEY = "tetris"
_ATTRIBUTE = "tetris_info"
_COUNTERS = (
    "num_rounds",
    "num_proposed_drafts",
    "num_verify_drafts",
    "num_correct_drafts",
    "num_trimmed_drafts",
)


def is_tetris(algorithm: Any) -> bool:
    """Whether a scheduler's algorithm is this one."""
    return getattr(algorithm, "name", None) == "TETRIS"


class RoundReporter:
    """The server's totals, its share of the log line, and its /metrics."""

    def __init__(self) -> None:
        self.totals = DraftCounters()
        self.num_steps = 0
        self._since_log = DraftCounters()
        self._planner: Any = None
        self._draft_budget = 0
        self._metrics: _Metrics | None = None

    def record_round_host(self, done: RoundRecord, planner: Any) -> None:
        """Add one round.

        planner is the budget as the user wrote it, and the reasons for what it came to.
        """
        nodes = zip(done.trees.num_nodes.tolist(), done.view.caps, strict=True)
        counters = count_round(
            num_nodes=[min(drafted, cap) for drafted, cap in nodes],
            verify_lens=done.allocation.verify_lens.tolist(),
            accept_lens=done.accept_lens,
        )
        self.num_steps += 1
        self._planner, self._draft_budget = planner, done.draft_budget
        budget_text = str(planner)
        round_counts = DraftCounters()
        settings = done.view.settings
        for req, own, counts in zip(done.reqs, settings, counters, strict=True):
            before = vars(req).get(_ATTRIBUTE, (DraftCounters(), None, None))[0]
            setattr(req, _ATTRIBUTE, (before + counts, budget_text, own.limit))
            round_counts = round_counts + counts
        self.totals = self.totals + round_counts
        self._since_log = self._since_log + round_counts
        if self._metrics is not None:
            self._metrics.add(round_counts)

    def before_log(self, stats: Any, due: bool) -> None:
        """Put the true accept rate into SGLang's statistics and log our own line.

        stats is SGLang's metrics reporter. It divides its count of correct drafts by
        rounds * (num_draft_tokens - 1), as if nothing had ever been trimmed; scaling
        that count makes the quotient correct / verified.
        """
        if self._metrics is None and stats.current_scheduler_metrics_enabled:
            self._metrics = _Metrics(stats.metrics_collector.labels)
            self._metrics.add(self.totals)
        if not due:
            return
        counts, self._since_log = self._since_log, DraftCounters()
        if not counts.num_rounds:
            return
        full_width = counts.num_rounds * stats.scheduler.draft_worker.max_drafts
        # With this project's patch SGLang divides by what was verified, see patches/.
        if not hasattr(stats, "spec_num_verify_drafts"):
            stats.spec_num_correct_drafts = counts.accept_rate * full_width
        if self._metrics is not None:
            self._metrics.set_rates(counts, self._draft_budget)
        if stats.is_stats_logging_rank:
            logger.info(
                "TETRIS: #round: %d, proposed: %d, verified: %d, trimmed: %d, "
                "correct: %d, accept len: %.2f, accept rate: %.2f, budget: %s = %d, %s",
                counts.num_rounds,
                counts.num_proposed_drafts,
                counts.num_verify_drafts,
                counts.num_trimmed_drafts,
                counts.num_correct_drafts,
                counts.accept_length,
                counts.accept_rate,
                self._planner,
                self._draft_budget,
                self._planner.why(),
            )

    def describe(self) -> dict[str, Any]:
        """Return the totals for /server_info."""
        return {
            "num_steps": self.num_steps,
            "draft_budget": self._draft_budget,
            **counts_as_dict(self.totals),
        }


class _Metrics:
    """Prometheus counters beside SGLang's own, with SGLang's labels."""

    def __init__(self, labels: dict[str, str]) -> None:
        from prometheus_client import Counter, Gauge

        names = list(labels)
        self._counters = {
            name: Counter(
                f"sglang:tetris_{name}",
                f"TETRIS: {name.replace('_', ' ')} since start.",
                names,
            ).labels(**labels)
            for name in _COUNTERS
        }
        self._gauges = {
            name: Gauge(
                f"sglang:tetris_{name}",
                f"TETRIS: {name.replace('_', ' ')} at the last log line.",
                names,
                multiprocess_mode="mostrecent",
            ).labels(**labels)
            for name in ("accept_rate", "accept_length", "draft_budget")
        }

    def add(self, counts: DraftCounters) -> None:
        for name, counter in self._counters.items():
            counter.inc(getattr(counts, name))

    def set_rates(self, counts: DraftCounters, draft_budget: int) -> None:
        self._gauges["accept_rate"].set(counts.accept_rate)
        self._gauges["accept_length"].set(counts.accept_length)
        self._gauges["draft_budget"].set(draft_budget)


def counts_as_dict(counts: DraftCounters) -> dict[str, Any]:
    """Return the counts and what follows from them."""
    return {
        **{name: getattr(counts, name) for name in _COUNTERS},
        "accept_rate": counts.accept_rate,
        "accept_length": counts.accept_length,
    }


def request_info(req: Any) -> dict[str, Any]:
    """Return a request's entry for `meta_info`, before and during its rounds."""
    counts, budget, limit = vars(req).get(_ATTRIBUTE, (DraftCounters(), None, None))
    return {"draft_budget": budget, "max_drafts": limit, **counts_as_dict(counts)}


def truthful_meta_info(info: dict[str, Any]) -> dict[str, Any]:
    """Return SGLang's spec_* keys of `meta_info` with what really happened."""
    if not info["num_rounds"]:
        return {}
    return {
        "spec_accept_rate": info["accept_rate"],
        # SGLang counts the prompt step's token as one of the rounds'.
        "spec_accept_length": info["accept_length"],
        "spec_num_proposed_drafts": info["num_proposed_drafts"],
        "spec_num_verify_drafts": info["num_verify_drafts"],
        "spec_num_trimmed_drafts": info["num_trimmed_drafts"],
        "spec_num_correct_drafts": info["num_correct_drafts"],
    }
