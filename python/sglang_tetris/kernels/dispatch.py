"""Chooses who computes: Triton on a GPU, the core's own functions anywhere else.

A GPU without triton is served by the core's torch operations. All give the same
results, bit for bit, so nothing but time depends on the choice.
"""

import functools
import importlib
import importlib.util
from typing import Any

import torch

from sglang_tetris import core
from sglang_tetris.core import Allocation, DraftTrees, VerifyPlan


def path_survival(trees: DraftTrees) -> torch.Tensor:
    """`core.path_survival`, by the backend for the trees' device."""
    survival: torch.Tensor = _chosen("path_survival", trees)(trees)
    return survival


def select_draft_tokens(
    trees: DraftTrees,
    *,
    draft_budget: int | torch.Tensor,
    max_drafts: int | torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    min_drafts: int | torch.Tensor | None = None,
) -> Allocation:
    """`core.select_draft_tokens`, by the backend for the trees' device."""
    allocation: Allocation = _chosen("select_draft_tokens", trees)(
        trees,
        draft_budget=draft_budget,
        max_drafts=max_drafts,
        weights=weights,
        min_drafts=min_drafts,
    )
    return allocation


def build_verify_plan(
    trees: DraftTrees,
    allocation: Allocation,
    *,
    anchors: torch.Tensor,
    prefix_lens: torch.Tensor,
    total_verify_tokens: int | None = None,
    num_mask_elements: int | None = None,
) -> VerifyPlan:
    """`core.build_verify_plan`, by the backend for the trees' device."""
    plan: VerifyPlan = _chosen("build_verify_plan", trees)(
        trees,
        allocation,
        anchors=anchors,
        prefix_lens=prefix_lens,
        total_verify_tokens=total_verify_tokens,
        num_mask_elements=num_mask_elements,
    )
    return plan


def triton_operations() -> dict[str, Any]:
    """Return the Triton versions of the operations above, by name; imports triton."""
    files = {
        "path_survival": "survival_triton",
        "select_draft_tokens": "select_triton",
        "build_verify_plan": "plan_triton",
    }
    return {
        name: getattr(importlib.import_module(f"sglang_tetris.kernels.{file}"), name)
        for name, file in files.items()
    }


@functools.cache
def operations_on(device_type: str) -> dict[str, Any]:
    """Return the operations for a device, by name; "cuda" is an AMD GPU as well."""
    if device_type == "cuda" and importlib.util.find_spec("triton") is not None:
        return triton_operations()
    return vars(core)


def _chosen(name: str, trees: DraftTrees) -> Any:
    return operations_on(trees.tokens.device.type)[name]
