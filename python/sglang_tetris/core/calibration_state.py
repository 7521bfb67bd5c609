"""What a calibrator has learnt, as a record and as JSON text.

The maps are not part of it: they follow from it, bit for bit (core.calibration_fit).
"""

import json
import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from sglang_tetris.core.calibration_map import (
    MAX_CELL_DEPTH,
    MAX_CELL_RANK,
    NUM_KNOTS,
)
from sglang_tetris.core.errors import check_count
from sglang_tetris.core.sampling_classes import SAMPLING_CLASS_NAMES

_FORMAT = "sglang_tetris.calibration/1"
_NUM_CLASSES = len(SAMPLING_CLASS_NAMES)
_SUMS_SHAPE = (3, MAX_CELL_DEPTH, MAX_CELL_RANK + 1, NUM_KNOTS)
_TOTALS_SHAPE = (4,)


@dataclass(slots=True, kw_only=True, eq=False)
class CalibrationState:
    """The settings of a calibrator and its decayed sums, changed in place.

    half_life_rounds  finite, > 0
    prior_nodes       finite, > 0
    num_rounds        rounds that had labels
    sums              [classes, 3, depths, ranks, knots] float64: nodes, probabilities
                      and correct nodes, as shared out between knots
    totals            [classes, 4] float64: nodes, their raw and their calibrated
                      probability, correct nodes

    Raises ValueError naming the field and its value; `sums` and `totals` are made by
    this module alone.
    """

    half_life_rounds: float
    prior_nodes: float
    num_rounds: int
    sums: npt.NDArray[np.float64]
    totals: npt.NDArray[np.float64]

    def __post_init__(self) -> None:
        for name in ("half_life_rounds", "prior_nodes"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be finite and positive, got {value}")
        check_count("num_rounds", self.num_rounds)

    @classmethod
    def empty(cls, *, half_life_rounds: float, prior_nodes: float) -> Self:
        """Return the state before the first round."""
        return cls(
            half_life_rounds=half_life_rounds,
            prior_nodes=prior_nodes,
            num_rounds=0,
            sums=np.zeros((_NUM_CLASSES, *_SUMS_SHAPE)),
            totals=np.zeros((_NUM_CLASSES, *_TOTALS_SHAPE)),
        )

    def describe(self) -> dict[str, Any]:
        """See `Calibrator.describe`."""
        classes = {}
        for name, totals in zip(SAMPLING_CLASS_NAMES, self.totals, strict=True):
            nodes, *means = totals.tolist()
            if nodes > 0:
                raw, calibrated, correct = (total / nodes for total in means)
                classes[name] = {
                    "nodes": nodes,
                    "raw_mean": raw,
                    "calibrated_mean": calibrated,
                    "accept_rate": correct,
                }
        return {"num_rounds": self.num_rounds, "classes": classes}

    def to_json(self) -> str:
        """Return JSON text that `from_json` reads back unchanged."""
        classes = {
            name: {"totals": totals.tolist(), "sums": sums.tolist()}
            for name, totals, sums in zip(
                SAMPLING_CLASS_NAMES, self.totals, self.sums, strict=True
            )
            if totals[0] > 0
        }
        return json.dumps(
            {
                "format": _FORMAT,
                "half_life_rounds": self.half_life_rounds,
                "prior_nodes": self.prior_nodes,
                "num_rounds": self.num_rounds,
                "classes": classes,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a state from JSON text; ValueError for anything that is not one."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"calibration is not valid JSON: {error}") from None
        if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
            raise ValueError(f'calibration must be a JSON object of format "{_FORMAT}"')
        try:
            state = cls.empty(
                half_life_rounds=float(fields.pop("half_life_rounds")),
                prior_nodes=float(fields.pop("prior_nodes")),
            )
            state.num_rounds = check_count("num_rounds", fields.pop("num_rounds"))
            state._read_classes(_object("classes", fields.pop("classes")))
        except KeyError as error:
            raise ValueError(f"calibration lacks the key {error}") from None
        except TypeError as error:
            raise ValueError(
                f"calibration has a value of wrong type: {error}"
            ) from None
        _refuse_unknown("", fields)
        return state

    def _read_classes(self, classes: dict[str, Any]) -> None:
        for group, name in enumerate(SAMPLING_CLASS_NAMES):
            if name in classes:
                fields = _object(f"classes.{name}", classes.pop(name))
                for key, shape, target in (
                    ("totals", _TOTALS_SHAPE, self.totals),
                    ("sums", _SUMS_SHAPE, self.sums),
                ):
                    where = f"calibration.classes.{name}.{key}"
                    target[group] = _read_sums(where, fields.pop(key), shape)
                _refuse_unknown(f".classes.{name}", fields)
                nodes, *parts = self.sums[group]
                if (np.array(parts) > nodes).any():
                    raise ValueError(
                        f"calibration.classes.{name}.sums must count no more correct "
                        "nodes, and no more probability, than nodes"
                    )
        _refuse_unknown(".classes", classes)


def _object(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"calibration.{where} must be an object, got {value!r}")
    return value


def _read_sums(
    where: str, value: object, shape: tuple[int, ...]
) -> npt.NDArray[np.float64]:
    try:
        sums = np.array(value, np.float64)
    except ValueError:
        # Lists of unequal lengths.
        sums = np.empty(0)
    if sums.shape != shape:
        raise ValueError(f"{where} must be numbers of shape {list(shape)}")
    usable = (sums >= 0) & (sums < np.inf)
    if not usable.all():
        bad = sums[~usable][0]
        raise ValueError(f"{where} must be finite and at least 0, got {bad}")
    return sums


def _refuse_unknown(where: str, fields: dict[str, Any]) -> None:
    if fields:
        raise ValueError(f"calibration{where} has unknown keys {sorted(fields)}")
