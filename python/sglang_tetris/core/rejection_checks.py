"""Checks of what `verify_chains` is given: shapes anywhere, values on a CPU."""

import torch

from sglang_tetris.core.errors import check_tensor
from sglang_tetris.core.types import VerifyPlan

_LAWS = (torch.float32, torch.float64)
# How far a law's sum may be from 1: wider than any rounding, narrower than a mistake.
_SUM_TOLERANCE = 1e-3


def check_shapes(
    plan: VerifyPlan,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    uniforms: torch.Tensor,
    uniforms_final: torch.Tensor,
    draft_token_ids: torch.Tensor | None,
) -> None:
    """Raise ValueError for a wrong shape, dtype or device; reads no values."""
    device, bs = plan.input_ids.device, plan.batch_size
    num_rows = plan.input_ids.shape[0]
    check_tensor("target_probs", target_probs, "[T, V]", (num_rows, -1), _LAWS, device)
    vocab, dtype = target_probs.shape[1], target_probs.dtype
    known = vocab
    if draft_token_ids is not None:
        ids = draft_token_ids
        check_tensor("draft_token_ids", ids, "[Vd]", (-1,), torch.int64, device)
        known = ids.shape[0]
    check_tensor(
        "draft_probs", draft_probs, "[bs, N, Vd]", (bs, -1, known), dtype, device
    )
    drafts = draft_probs.shape[1]
    if drafts < plan.max_depth:
        raise ValueError(
            f"draft_probs must hold a law for each of {plan.max_depth} drafts, "
            f"got shape {list(draft_probs.shape)}"
        )
    check_tensor("uniforms", uniforms, "[bs, N]", (bs, drafts), torch.float64, device)
    check_tensor("uniforms_final", uniforms_final, "[bs]", (bs,), torch.float64, device)


def check_values_host(
    plan: VerifyPlan,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    uniforms: torch.Tensor,
    uniforms_final: torch.Tensor,
    draft_token_ids: torch.Tensor | None,
) -> None:
    """Raise ValueError for unusable values where they are used; reads them."""
    parents = plan.retrieve_parent
    before = torch.arange(parents.shape[1], device=parents.device) - 1
    _refuse(
        "plan.retrieve_parent",
        parents,
        (parents >= 0) & (parents != before),
        "the place before, in a plan of chains",
    )
    vocab = target_probs.shape[1]
    live = torch.arange(target_probs.shape[0]) < plan.qo_indptr[-1]
    drafts = torch.arange(draft_probs.shape[1])
    verified = drafts < plan.verify_lens[:, None] - 1
    _check_in("plan.input_ids", plan.input_ids, live, vocab)
    _check_laws("target_probs", target_probs, live)
    _check_laws("draft_probs", draft_probs, verified)
    _check_uniforms("uniforms", uniforms, verified)
    _check_uniforms("uniforms_final", uniforms_final, uniforms_final == uniforms_final)
    if draft_token_ids is not None:
        every = torch.ones_like(draft_token_ids, dtype=torch.bool)
        _check_in("draft_token_ids", draft_token_ids, every, vocab)
        again = draft_token_ids.bincount(minlength=vocab)[draft_token_ids] > 1
        _refuse("draft_token_ids", draft_token_ids, again, "distinct")


def check_drawn_host(drawn_from: torch.Tensor, verified: torch.Tensor) -> None:
    """Raise ValueError if a verified draft has no probability under its own law."""
    impossible = verified & ~(drawn_from > 0)
    _refuse("draft_probs", drawn_from, impossible, "positive at the token drawn")


def _check_laws(name: str, laws: torch.Tensor, used: torch.Tensor) -> None:
    sums = laws.sum(-1)
    # Written so that NaN is refused as well.
    bad = used & ~((sums - 1).abs() <= _SUM_TOLERANCE)
    _refuse(name, sums, bad, "laws that add up to 1")


def _check_uniforms(name: str, values: torch.Tensor, used: torch.Tensor) -> None:
    _refuse(name, values, used & ~((values >= 0) & (values < 1)), "in [0, 1)")


def _check_in(name: str, ids: torch.Tensor, used: torch.Tensor, vocab: int) -> None:
    outside = used & ((ids < 0) | (ids >= vocab))
    _refuse(name, ids, outside, f"in [0, {vocab})")


def _refuse(name: str, values: torch.Tensor, bad: torch.Tensor, wanted: str) -> None:
    if bad.any():
        where = bad.nonzero()[0].tolist()
        value = values[tuple(where)].item()
        raise ValueError(f"{name} must be {wanted}, got {value} at {where}")
