"""The core's operations on CPU tensors, run by compiled loops.

Imported by core.backend on first use, since it imports numba. The functions have the
signatures of their `_torch` counterparts; arguments have been checked by the caller.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_tetris.core import cpu_calibrate, cpu_plan, cpu_select
from sglang_tetris.core.layout import (
    check_bound_host,
    check_plan_values_host,
    padded_width,
)
from sglang_tetris.core.survival import node_depths_torch
from sglang_tetris.core.types import AcceptResult, Allocation, DraftTrees, VerifyPlan

_NO_WEIGHTS = np.empty(0, np.float32)
_NO_CAPS = np.empty(0, np.int64)


def path_survival(trees: DraftTrees) -> torch.Tensor:
    survival = torch.empty(trees.accept_probs.shape)
    cpu_select.fill_survival(
        _array(trees.parents),
        _array(trees.accept_probs),
        _array(trees.num_nodes),
        survival.numpy(),
    )
    return survival


def depths_and_ranks(trees: DraftTrees) -> tuple[torch.Tensor, torch.Tensor]:
    depths, ranks = torch.empty(2, *trees.parents.shape, dtype=torch.int64).unbind()
    cpu_calibrate.fill_ranks(
        _array(trees.parents),
        _array(trees.accept_probs),
        _array(trees.num_nodes),
        depths.numpy(),
        ranks.numpy(),
    )
    return depths, ranks


def calibrated(
    probs: torch.Tensor,
    depths: torch.Tensor,
    ranks: torch.Tensor,
    classes: torch.Tensor,
    values: npt.NDArray[np.float32],
) -> torch.Tensor | None:
    """Look every node up; None if an argument has a value out of range."""
    out = torch.empty(probs.shape)
    consistent = cpu_calibrate.fill_calibrated(
        _array(probs),
        _array(depths),
        _array(ranks),
        _array(classes),
        values,
        out.numpy(),
    )
    return out if consistent else None


def calibrated_trees(
    trees: DraftTrees, classes: torch.Tensor, values: npt.NDArray[np.float32]
) -> torch.Tensor | None:
    """Rank every node and look it up; None if a class is out of range."""
    out = torch.empty(trees.accept_probs.shape)
    consistent = cpu_calibrate.fill_calibrated_trees(
        _array(trees.parents),
        _array(trees.accept_probs),
        _array(trees.num_nodes),
        _array(classes),
        values,
        out.numpy(),
    )
    return out if consistent else None


def select_draft_tokens(
    trees: DraftTrees,
    draft_budget: int,
    max_drafts: int | torch.Tensor | None,
    weights: torch.Tensor | None,
) -> Allocation:
    bs, max_nodes = trees.tokens.shape
    caps = _NO_CAPS
    if isinstance(max_drafts, torch.Tensor):
        caps = _array(max_drafts)
    elif max_drafts is not None:
        caps = np.full(bs, max_drafts, np.int64)
    keep = torch.empty(bs, max_nodes, dtype=torch.bool)
    verify_lens = torch.empty(bs, dtype=torch.int32)
    expected = torch.empty(bs, dtype=torch.float32)
    cpu_select.fill_selection(
        _array(trees.parents),
        _array(trees.accept_probs),
        _array(trees.num_nodes),
        _NO_WEIGHTS if weights is None else _array(weights),
        caps,
        draft_budget,
        keep.numpy(),
        verify_lens.numpy(),
        expected.numpy(),
    )
    return Allocation(
        keep=keep, verify_lens=verify_lens, expected_correct_drafts=expected
    )


def build_verify_plan(
    trees: DraftTrees,
    allocation: Allocation,
    anchors: torch.Tensor,
    prefix_lens: torch.Tensor,
    total_verify_tokens: int | None,
    num_mask_elements: int | None,
) -> VerifyPlan:
    parents, keep = _array(trees.parents), _array(allocation.keep)
    verify_lens = _array(allocation.verify_lens)
    depth_bound = trees.max_nodes if trees.max_depth is None else trees.max_depth
    num_rows, num_elements, width, max_depth, consistent = cpu_plan.measure_plan(
        parents,
        _array(trees.num_nodes),
        keep,
        verify_lens,
        _array(prefix_lens),
        depth_bound,
    )
    if not consistent:
        # Finds the fault again, slowly, and words the message.
        check_plan_values_host(trees, allocation, prefix_lens, node_depths_torch(trees))
    if total_verify_tokens is not None and num_mask_elements is not None:
        width, max_depth = padded_width(trees, total_verify_tokens)
    if total_verify_tokens is not None:
        check_bound_host("total_verify_tokens", total_verify_tokens, num_rows)
        num_rows = total_verify_tokens
    if num_mask_elements is not None:
        check_bound_host("num_mask_elements", num_mask_elements, num_elements)
        num_elements = num_mask_elements
    rows = torch.empty(3, num_rows, dtype=torch.int64)
    tables = torch.empty(4, trees.batch_size, width, dtype=torch.int64)
    qo_indptr = torch.empty(trees.batch_size + 1, dtype=torch.int32)
    tree_mask = torch.empty(num_elements, dtype=torch.bool)
    cpu_plan.fill_plan(
        _array(trees.tokens),
        parents,
        keep,
        verify_lens,
        _array(anchors),
        _array(prefix_lens),
        rows.numpy(),
        qo_indptr.numpy(),
        tables.numpy(),
        tree_mask.numpy(),
    )
    input_ids, positions, node_ids = rows.unbind()
    index, next_token, next_sibling, parent = tables.unbind()
    return VerifyPlan(
        input_ids=input_ids,
        positions=positions,
        qo_indptr=qo_indptr,
        node_ids=node_ids,
        retrieve_index=index,
        retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling,
        retrieve_parent=parent,
        tree_mask=tree_mask,
        prefix_lens=prefix_lens,
        max_depth=max_depth,
    )


def match_tree(plan: VerifyPlan, target_tokens: torch.Tensor) -> AcceptResult:
    shape = (plan.batch_size, plan.max_depth + 1)
    result = AcceptResult(
        accept_index=torch.empty(shape, dtype=torch.int32),
        accept_lens=torch.empty(shape[0], dtype=torch.int32),
        accept_tokens=torch.empty(shape, dtype=torch.int64),
    )
    cpu_plan.fill_accepted(
        _array(plan.input_ids),
        _array(target_tokens),
        _array(plan.retrieve_index),
        _array(plan.retrieve_next_token),
        _array(plan.retrieve_next_sibling),
        result.accept_index.numpy(),
        result.accept_lens.numpy(),
        result.accept_tokens.numpy(),
    )
    return result


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """View as the contiguous array that the loops were compiled for."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.requires_grad:
        tensor = tensor.detach()
    array: npt.NDArray[Any] = tensor.numpy()
    return array
