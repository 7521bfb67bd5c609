"""A round without drafts, in the terms of one with them: a row per request.

Building these checks them, which takes a tenth of what else the host does in such a
round; so all but the requests' own numbers is made once per batch size. The results
share tensors: they are not to be written to.
"""

import dataclasses
from functools import lru_cache

import torch

from sglang_tetris.core import (
    AcceptResult,
    Allocation,
    DraftTrees,
    VerifyPlan,
    build_verify_plan,
    select_draft_tokens,
)


@lru_cache(maxsize=512)
def no_drafts(bs: int, device: torch.device) -> DraftTrees:
    """Return trees without a node."""
    empty = torch.empty((bs, 0), dtype=torch.int64, device=device)
    return DraftTrees(
        tokens=empty,
        parents=empty.clone(),
        accept_probs=torch.empty((bs, 0), device=device),
        num_nodes=torch.zeros(bs, dtype=torch.int64, device=device),
        max_depth=0,
    )


@lru_cache(maxsize=512)
def none_kept(bs: int, device: torch.device) -> Allocation:
    """Return the allocation of trees without a node."""
    return select_draft_tokens(no_drafts(bs, device), draft_budget=0)


def anchor_plan(anchors: torch.Tensor, prefix_lens: torch.Tensor) -> VerifyPlan:
    """Return `build_verify_plan` of trees without a node.

    anchors, prefix_lens  [bs] int64
    """
    return dataclasses.replace(
        _anchor_tables(len(anchors), anchors.device),
        input_ids=anchors,
        positions=prefix_lens,
        prefix_lens=prefix_lens,
    )


def accept_anchors(plan: VerifyPlan, target_tokens: torch.Tensor) -> AcceptResult:
    """Return `match_tree` of an anchor plan: the target's token of each request.

    target_tokens  [bs] int64
    """
    return AcceptResult(
        accept_index=plan.retrieve_index.to(torch.int32),
        accept_lens=torch.ones_like(plan.qo_indptr[1:]),
        accept_tokens=target_tokens[:, None],
    )


@lru_cache(maxsize=512)
def _anchor_tables(bs: int, device: torch.device) -> VerifyPlan:
    blank = torch.zeros(bs, dtype=torch.int64, device=device)
    return build_verify_plan(
        no_drafts(bs, device), none_kept(bs, device), anchors=blank, prefix_lens=blank
    )
