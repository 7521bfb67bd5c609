"""The allocator core: pure functions and records, usable without SGLang.

A round, top to bottom: `DraftTrees` -> `path_survival` -> a budget ->
`select_draft_tokens` -> `build_verify_plan` -> (the target chooses a token per row) ->
`match_tree`. A `Calibrator` corrects the trees' probabilities before, and learns from
the round's `labelled_nodes` after. Sampled chains may end in `verify_chains` instead of
`match_tree`; their probabilities are then those of `max_draft_prob` or `sum_square`,
and a budget that looks at survival is a `LaggedBudget` (`AutoPolicy` plans its own from
earlier rounds). Tensors may be on any device; on a CPU compiled loops are used where
numba is installed, and `warm_up` has them ready before the first request.
"""

from sglang_tetris.core.accept import match_tree
from sglang_tetris.core.allocator import select_draft_tokens
from sglang_tetris.core.backend import cpu_backend
from sglang_tetris.core.budget import (
    DraftBudget,
    FixedBudget,
    MeanBudget,
    ThroughputBudget,
)
from sglang_tetris.core.calibration import Calibrator
from sglang_tetris.core.calibration_error import (
    CalibrationError,
    bootstrap_interval,
    brier_score,
    debiased_calibration_error,
)
from sglang_tetris.core.config import BudgetSpec, TetrisConfig
from sglang_tetris.core.cost_table import CostSample, CostTable
from sglang_tetris.core.draft_values import max_draft_prob, sum_square
from sglang_tetris.core.errors import TetrisConfigError
from sglang_tetris.core.lagged_budget import LaggedBudget
from sglang_tetris.core.layout import build_verify_plan
from sglang_tetris.core.metrics import DraftCounters, count_round
from sglang_tetris.core.node_labels import LabelledNodes, labelled_nodes
from sglang_tetris.core.node_ranks import depths_and_ranks
from sglang_tetris.core.rejection import verify_chains
from sglang_tetris.core.sampling_classes import (
    NUM_SAMPLING_CLASSES,
    SAMPLING_CLASS_NAMES,
    sampling_class,
)
from sglang_tetris.core.survival import path_survival
from sglang_tetris.core.types import AcceptResult, Allocation, DraftTrees, VerifyPlan
from sglang_tetris.core.warmup import warm_up

__all__ = [
    "NUM_SAMPLING_CLASSES",
    "SAMPLING_CLASS_NAMES",
    "AcceptResult",
    "Allocation",
    "BudgetSpec",
    "CalibrationError",
    "Calibrator",
    "CostSample",
    "CostTable",
    "DraftBudget",
    "DraftCounters",
    "DraftTrees",
    "FixedBudget",
    "LabelledNodes",
    "LaggedBudget",
    "MeanBudget",
    "TetrisConfig",
    "TetrisConfigError",
    "ThroughputBudget",
    "VerifyPlan",
    "bootstrap_interval",
    "brier_score",
    "build_verify_plan",
    "count_round",
    "cpu_backend",
    "debiased_calibration_error",
    "depths_and_ranks",
    "labelled_nodes",
    "match_tree",
    "max_draft_prob",
    "path_survival",
    "sampling_class",
    "select_draft_tokens",
    "sum_square",
    "verify_chains",
    "warm_up",
]
