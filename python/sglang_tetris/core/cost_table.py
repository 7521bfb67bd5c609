"""What a step costs, as a function of its size.

    step_time_s(n, b, kv) = curve(bucket(n)) + per_request_s * b + per_kv_token_s * kv

n = total_verify_tokens (anchors included), b = batch_size, kv = total_kv_tokens.
A table's own curve is that of the target's verify forward. `phases` holds a table of
the same form for each other part of a round, n then being that part's rows:

    decode              the target's plain decode forward, one row per request
    draft_step          one forward of the draft: topk rows per drafting request
    draft_extend        the draft over what was emitted: a row per token
    sample_greedy, sample_multinomial, sample_sorted
                        choosing tokens: a row per row sampled
    outside             what SGLang does between two steps: a row per request
    prompt              the target over prompts: a row per token

`curve` is piecewise linear through the knots and never falls; beyond the last knot it
goes on with its last slope, before the first it stays level. `bucket(n)` is the
smallest of `bucket_edges` that holds n (a captured graph runs at its own size), and n
itself beyond the last edge. The time is positive and never falls in any argument.

Not decided here: what to do about the price (core.budget).
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from sglang_tetris.core.errors import check_count
from sglang_tetris.core.robust_fit import robust_nonnegative

PHASES = (
    *("decode", "draft_step", "draft_extend"),
    *("sample_greedy", "sample_multinomial", "sample_sorted", "outside", "prompt"),
)

_FORMAT = "sglang_tetris.cost_table/1"
_SHORTEST_S = 1e-9
_MAX_KNOTS = 8


class CostSample(NamedTuple):
    """One measured step."""

    total_verify_tokens: int
    batch_size: int
    total_kv_tokens: int
    step_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """A fitted cost model of one server; see the module for the formula.

    token_knots     strictly increasing token counts, at least one
    knot_times_s    positive, not falling, one per knot
    per_request_s   seconds per request in the batch, >= 0
    per_kv_token_s  seconds per token in the KV cache, >= 0
    bucket_edges    strictly increasing token counts of captured graphs, or empty
    phases          tables of the round's other parts by name, see the module; any of
                    `PHASES` may be missing

    Raises ValueError naming the field and its value.
    """

    token_knots: tuple[int, ...]
    knot_times_s: tuple[float, ...]
    per_request_s: float = 0.0
    per_kv_token_s: float = 0.0
    bucket_edges: tuple[int, ...] = ()
    phases: Mapping[str, "CostTable"] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_increasing("token_knots", self.token_knots)
        _check_increasing("bucket_edges", self.bucket_edges)
        times = self.knot_times_s
        if not self.token_knots or len(times) != len(self.token_knots):
            raise ValueError(
                "knot_times_s must hold one time per token knot, at least one, got "
                f"{len(times)} for {len(self.token_knots)} knots"
            )
        for earlier, later in zip((0.0, *times), times, strict=False):
            if not (0 < later < math.inf and earlier <= later):
                raise ValueError(
                    f"knot_times_s must be positive and must not fall, got {later} "
                    f"after {earlier}"
                )
        for name in ("per_request_s", "per_kv_token_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {value}")
        for name, phase in self.phases.items():
            if name not in PHASES:
                raise ValueError(f"phases must be among {PHASES}, got {name!r}")
            if not isinstance(phase, CostTable) or phase.phases:
                raise ValueError(
                    f"phases must hold tables without phases, got {phase!r} for {name}"
                )

    def step_time_s(
        self, *, total_verify_tokens: int, batch_size: int, total_kv_tokens: int
    ) -> float:
        """Return the expected seconds of one verify step; arguments >= 0."""
        check_count("total_verify_tokens", total_verify_tokens)
        times = self.step_times_s(
            total_verify_tokens=np.array([total_verify_tokens]),
            batch_size=batch_size,
            total_kv_tokens=total_kv_tokens,
        )
        return float(times[0])

    def step_times_s(
        self,
        *,
        total_verify_tokens: npt.NDArray[np.int64] | npt.NDArray[np.float64],
        batch_size: int,
        total_kv_tokens: int,
    ) -> npt.NDArray[np.float64]:
        """`step_time_s` of many token counts at once, all >= 0; means may be real."""
        check_count("batch_size", batch_size)
        check_count("total_kv_tokens", total_kv_tokens)
        tokens = bucketed(total_verify_tokens, self.bucket_edges)
        curve = np.interp(tokens, self.token_knots, self.knot_times_s)
        if len(self.token_knots) > 1:
            rise = self.knot_times_s[-1] - self.knot_times_s[-2]
            slope = rise / (self.token_knots[-1] - self.token_knots[-2])
            curve += slope * np.maximum(tokens - self.token_knots[-1], 0)
        curve += self.per_request_s * batch_size + self.per_kv_token_s * total_kv_tokens
        return curve

    def to_json(self) -> str:
        """Return the table as JSON text that `from_json` reads back unchanged."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a table from JSON text; ValueError for anything that is not one.

        A "provenance" beside the table's own keys is left alone.
        """
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"cost table is not valid JSON: {error}") from None
        if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
            raise ValueError(f'cost table must be a JSON object of format "{_FORMAT}"')
        fields.pop("provenance", None)
        phases = fields.pop("phases", {})
        if not isinstance(phases, dict):
            raise ValueError(f"cost table's phases must be an object, got {phases!r}")
        return cls._from_fields(
            fields, {name: cls._from_fields(part, {}) for name, part in phases.items()}
        )

    @classmethod
    def _from_fields(cls, fields: object, phases: Mapping[str, "CostTable"]) -> Self:
        if not isinstance(fields, dict):
            raise ValueError(f"cost table must hold JSON objects, got {fields!r}")
        left = dict(fields)
        if left.get("phases") == {}:
            del left["phases"]
        try:
            table = cls(
                token_knots=tuple(int(x) for x in left.pop("token_knots")),
                knot_times_s=tuple(float(x) for x in left.pop("knot_times_s")),
                per_request_s=float(left.pop("per_request_s")),
                per_kv_token_s=float(left.pop("per_kv_token_s")),
                bucket_edges=tuple(int(x) for x in left.pop("bucket_edges")),
                phases=phases,
            )
        except KeyError as error:
            raise ValueError(f"cost table lacks the key {error}") from None
        except TypeError as error:
            raise ValueError(f"cost table has a value of wrong type: {error}") from None
        if left:
            raise ValueError(f"cost table has unknown keys {sorted(left)}")
        return table

    @classmethod
    def fit(
        cls,
        samples: Iterable[CostSample | Mapping[str, float] | Sequence[float]],
        *,
        token_knots: Sequence[int] | None = None,
        bucket_edges: Sequence[int] = (),
    ) -> Self:
        """Fit the formula to measured steps by robust non-negative least squares.

        A sample is a CostSample, a mapping with its field names, or a sequence in its
        order. Outliers (a step that waited for something else) count less: Huber
        weights, reweighted until settled. Coefficients are held at 0 or above, which is
        what keeps the table from falling. Knots default to at most 8 of the measured
        token counts, evenly by number of samples.

        Raises ValueError without samples, and for a sample that is not usable.
        """
        rows = np.array([_sample_row(sample) for sample in samples], np.float64)
        if rows.shape[0] == 0:
            raise ValueError("samples must hold at least one measured step, got none")
        edges = tuple(int(edge) for edge in bucket_edges)
        _check_increasing("bucket_edges", edges)
        tokens = bucketed(rows[:, 0].astype(np.int64), edges)
        if token_knots is None:
            # Quantiles of the samples, taken at values that were really measured.
            at = np.linspace(0, 1, _MAX_KNOTS)
            token_knots = np.unique(np.quantile(tokens, at, method="nearest")).tolist()
        knots = tuple(int(knot) for knot in token_knots)
        _check_increasing("token_knots", knots)
        # Tokens climbed within each segment; the last one is open at its end.
        starts = np.array(knots[:-1], np.float64)
        lengths = np.diff(np.array(knots, np.float64))
        if len(lengths):
            lengths[-1] = np.inf
        climbed = np.clip(tokens[:, None] - starts, 0, lengths)
        ones = np.ones((len(rows), 1))
        columns = np.hstack([ones, climbed, rows[:, 1:3]])
        fitted = robust_nonnegative(columns, rows[:, 3])
        slopes = fitted[1 : len(knots)]
        rises = np.concatenate([[0.0], slopes * np.diff(np.array(knots))])
        times = np.maximum(fitted[0] + rises.cumsum(), _SHORTEST_S)
        return cls(
            token_knots=knots,
            knot_times_s=tuple(times.tolist()),
            per_request_s=float(fitted[-2]),
            per_kv_token_s=float(fitted[-1]),
            bucket_edges=edges,
        )


def bucketed(
    tokens: npt.NDArray[np.int64] | npt.NDArray[np.float64], edges: tuple[int, ...]
) -> npt.NDArray[np.int64] | npt.NDArray[np.float64]:
    """Return the size of the captured graph that holds so many tokens, if one does."""
    if not edges:
        return tokens
    table = np.array(edges, np.int64)
    holder = np.searchsorted(table, tokens, side="left")
    inside = holder < len(table)
    return np.where(inside, table[np.minimum(holder, len(table) - 1)], tokens)


def _check_increasing(name: str, values: tuple[int, ...]) -> None:
    for earlier, later in zip((-1, *values), values, strict=False):
        if later <= earlier:
            raise ValueError(
                f"{name} must be non-negative and strictly increasing, got {values}"
            )


def _sample_row(
    sample: CostSample | Mapping[str, float] | Sequence[float],
) -> tuple[float, ...]:
    if isinstance(sample, Mapping):
        try:
            row = tuple(float(sample[name]) for name in CostSample._fields)
        except KeyError as error:
            raise ValueError(f"samples: {error} is missing in {sample!r}") from None
    else:
        row = tuple(float(value) for value in sample)
    usable = len(row) == 4 and all(0 <= value < math.inf for value in row)
    if not usable or row[3] == 0:
        raise ValueError(
            "samples must hold (total_verify_tokens, batch_size, total_kv_tokens, "
            f"step_time_s), counts >= 0 and a positive time, got {sample!r}"
        )
    return row
