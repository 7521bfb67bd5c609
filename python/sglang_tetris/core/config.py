"""TETRIS's settings, parsed from the values of flags; reads no file or environment.

    --tetris-budget      auto | N | kx     chosen by price; N drafts a step; k a request
    --tetris-verify      match | rejection
    --tetris-draft       auto | eagle | eagle3 | standalone | none
    --tetris-cost-table  PATH
    --tetris-trace       PATH
    --tetris-config      a JSON object with any of the keys of `TetrisConfig.EXTRA_KEYS`

Here a value is judged by itself; whether this release can serve it is for the adapter
to say at start-up.
"""

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args

from sglang_tetris.core.budget import DraftBudget, FixedBudget, MeanBudget
from sglang_tetris.core.errors import TetrisConfigError

VerifyMode = Literal["match", "rejection"]
ValueRule = Literal["max", "square"]
DraftKind = Literal["auto", "eagle", "eagle3", "standalone", "none"]
T = TypeVar("T", bound=str)


@dataclass(frozen=True, slots=True)
class BudgetSpec:
    """A parsed `--tetris-budget`; `str()` gives the flag's value back."""

    mode: Literal["auto", "fixed", "mean"]
    value: int = 0

    def __str__(self) -> str:
        if self.mode == "auto":
            return "auto"
        return f"{self.value}x" if self.mode == "mean" else str(self.value)

    def policy(self) -> DraftBudget | None:
        """Return the policy, or None for auto, which needs more than the flag."""
        if self.mode == "auto":
            return None
        kind = MeanBudget if self.mode == "mean" else FixedBudget
        return kind(self.value)


def parse_budget(value: str | int) -> BudgetSpec:
    """Parse "auto", "N" or "kx" (or the int N); TetrisConfigError for the rest."""
    text = str(value).strip().lower()
    if text == "auto":
        return BudgetSpec("auto")
    match = re.fullmatch(r"([0-9]+)(x?)", text)
    if match is None or isinstance(value, bool):
        raise TetrisConfigError(
            'tetris-budget must be "auto", a number of drafts per step such as "16", '
            f'or per request such as "3x", got {value!r}'
        )
    return BudgetSpec("mean" if match[2] else "fixed", int(match[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestConfig:
    """A request's own settings; None = the server's.

    max_drafts      cap on its drafts per round, 0 = plain decoding
    target_tpot_ms  milliseconds per token that it is to keep to
    """

    max_drafts: int | None = None
    target_tpot_ms: float | None = None


def parse_request(custom_params: Mapping[str, object] | None) -> RequestConfig:
    """Parse a request's `custom_params`: {"tetris": {"max_drafts": n, ...}}.

    Keys beside "tetris" belong to others and are left alone. TetrisConfigError for an
    unknown key within it, and for a value that is not valid.
    """
    params = (custom_params or {}).get("tetris")
    if params is None:
        return RequestConfig()
    if not isinstance(params, Mapping):
        raise TetrisConfigError(
            f"custom_params.tetris must be an object, got {params!r}"
        )
    where = "custom_params.tetris"
    _refuse_unknown(where, params, ("max_drafts", "target_tpot_ms"))
    return RequestConfig(
        max_drafts=_optional_count(f"{where}.max_drafts", params.get("max_drafts")),
        target_tpot_ms=_optional_positive(
            f"{where}.target_tpot_ms", params.get("target_tpot_ms")
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TetrisConfig:
    """All of TETRIS's settings.

    max_drafts        cap on the drafts of any one request and round, None = no cap; a
                      request's own cap can only lower it
    min_drafts        drafts that each request gets before any request gets more
    priority_weight   factor by which one step of a request's priority raises the worth
                      of its drafts
    target_tpot_ms    milliseconds per token that requests are to keep to; one that is
                      behind counts more. None = throughput alone
    calibration       learn acceptance from what was verified; off = take the draft's
                      probabilities as they are
    calibration_path  file that the calibration starts from and is saved to, or None
    kept_tokens       tokens per request whose draft input is kept while nothing is
                      drafted, to be caught up later
    draft_always      draft in every round, also where nothing will be verified: for
                      traces
    trace_tokens      write token ids into the trace: they are the users' text
    block_verification, value_rule
                      of `rejection`: verify a chain's drafts together; what a position
                      is worth, max (its likeliest token) or square (sum of squares)
    """

    # Keys of --tetris-config; everything else has a flag of its own.
    EXTRA_KEYS: ClassVar[tuple[str, ...]] = (
        *("max_drafts", "min_drafts", "priority_weight", "target_tpot_ms"),
        *("calibration", "calibration_path", "kept_tokens"),
        *("draft_always", "trace_tokens", "block_verification", "value_rule"),
    )

    budget: BudgetSpec = BudgetSpec("auto")
    verify: VerifyMode = "match"
    draft: DraftKind = "auto"
    cost_table: str | None = None
    trace: str | None = None
    max_drafts: int | None = None
    min_drafts: int = 0
    priority_weight: float = 1.0
    target_tpot_ms: float | None = None
    calibration: bool = True
    calibration_path: str | None = None
    kept_tokens: int = 64
    draft_always: bool = False
    trace_tokens: bool = False
    block_verification: bool = False
    value_rule: ValueRule = "max"

    @classmethod
    def parse(
        cls,
        *,
        budget: str | int = "auto",
        verify: str = "match",
        draft: str = "auto",
        cost_table: str | None = None,
        trace: str | None = None,
        config: str | Mapping[str, object] | None = None,
    ) -> Self:
        """Parse the flags' values; `config` is JSON text or the object itself.

        Raises TetrisConfigError, a ValueError, in one sentence that names the flag or
        key and the value.
        """
        extra = _parse_extra(config, cls.EXTRA_KEYS)
        return cls(
            budget=parse_budget(budget),
            verify=_choice("tetris-verify", verify, get_args(VerifyMode)),
            draft=_choice("tetris-draft", draft, get_args(DraftKind)),
            cost_table=_optional_path("tetris-cost-table", cost_table),
            trace=_optional_path("tetris-trace", trace),
            **_extra_values(extra),
        )

    def request_max_drafts(self, own: int | None) -> int | None:
        """Return the cap that holds for a request whose own cap is `own`."""
        caps = [cap for cap in (self.max_drafts, own) if cap is not None]
        return min(caps, default=None)


def _parse_extra(
    config: str | Mapping[str, object] | None, keys: tuple[str, ...]
) -> Mapping[str, object]:
    if config is None:
        return {}
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except json.JSONDecodeError as error:
            raise TetrisConfigError(
                f"tetris-config is not valid JSON: {error}"
            ) from None
    if not isinstance(config, Mapping):
        raise TetrisConfigError(f"tetris-config must be an object, got {config!r}")
    for key in config:
        if key in ("budget", "verify", "draft", "cost_table", "trace"):
            flag = "--tetris-" + key.replace("_", "-")
            raise TetrisConfigError(
                f"tetris-config: {key!r} has a flag of its own, {flag}"
            )
    _refuse_unknown("tetris-config", config, keys)
    return config


def _extra_values(extra: Mapping[str, object]) -> dict[str, Any]:
    """Check the keys of --tetris-config, those that are there."""

    def rule(name: str, value: object) -> object:
        return _choice(name, value, get_args(ValueRule))

    checks: dict[str, Callable[[str, object], object]] = {
        "max_drafts": _optional_count,
        "min_drafts": _count,
        "priority_weight": _positive,
        "target_tpot_ms": _optional_positive,
        "calibration": _flag,
        "calibration_path": _optional_path,
        "kept_tokens": _count,
        "draft_always": _flag,
        "trace_tokens": _flag,
        "block_verification": _flag,
        "value_rule": rule,
    }
    return {
        key: checks[key](f"tetris-config.{key}", value) for key, value in extra.items()
    }


def _refuse_unknown(
    where: str, given: Mapping[str, object], known: tuple[str, ...]
) -> None:
    for key in given:
        if key in known:
            continue
        nearest = difflib.get_close_matches(str(key), known, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {list(known)}"
        raise TetrisConfigError(f"{where}: unknown key {key!r}; {hint}")


def _choice(name: str, value: object, choices: tuple[T, ...]) -> T:
    for choice in choices:
        if value == choice:
            return choice
    nearest = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise TetrisConfigError(
        f"{name} must be one of {', '.join(choices)}, got {value!r}{hint}"
    )


def _optional_path(name: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise TetrisConfigError(f"{name} must be a path, got {value!r}")
    return value


def _optional_count(name: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TetrisConfigError(f"{name} must be an int of at least 0, got {value!r}")
    return value


def _count(name: str, value: object) -> int:
    count = _optional_count(name, value)
    if count is None:
        raise TetrisConfigError(f"{name} must be an int of at least 0, got None")
    return count


def _positive(name: str, value: object) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Written so that NaN is refused as well.
    if not number or not 0 < float(value) < math.inf:  # type: ignore[arg-type]
        raise TetrisConfigError(f"{name} must be a positive number, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def _optional_positive(name: str, value: object) -> float | None:
    return None if value is None else _positive(name, value)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TetrisConfigError(f"{name} must be true or false, got {value!r}")
    return value
