"""The target's law at a row as plain decoding would sample from it.

    softmax(processed logits / temperature), then top-k, top-p and min-p, renormalised

The filters are those of SGLang's torch sampler: all three look at the same ordered
probabilities, a token stays while what comes before it holds at most top_p. With its
FlashInfer sampler and min-p they follow each other instead, renormalising in between.

Source: SGLang's layers/sampler.py, top_k_top_p_min_p_sampling_from_probs_torch.
"""

from typing import Any

import torch


def target_law(
    logits: torch.Tensor, info: Any, *, one_after_the_other: bool
) -> torch.Tensor:
    """Return the law `[rows, vocab]` float32 that each row's token is drawn from.

    logits  [rows, vocab] after penalties, bias, grammar and processors
    info    SGLang's sampling parameters, one row each; greedy rows have top_k 1

    Greedy rows come out one-hot at their arg-max.
    """
    probs = torch.softmax(finite(logits) / info.temperatures, dim=-1)
    filtered = (
        info.need_top_p_sampling
        or info.need_top_k_sampling
        or info.need_min_p_sampling
        or info.is_any_greedy
    )
    if filtered:
        probs = _filtered(probs, info, one_after_the_other and info.need_min_p_sampling)
    return probs / probs.sum(-1, keepdim=True)


def finite(logits: torch.Tensor) -> torch.Tensor:
    """Return logits whose law adds up to 1 at any temperature: NaN is as good as 0.

    What stands for infinity is of SGLang's size: divided by a temperature of one in a
    million it is still a float32, which the largest one would not be.
    """
    return torch.nan_to_num(logits.float(), nan=0.0, posinf=1e30, neginf=-1e30)


def _filtered(probs: torch.Tensor, info: Any, sequential: bool) -> torch.Tensor:
    ordered, tokens = probs.sort(dim=-1, descending=True)
    rank = torch.arange(ordered.shape[-1], device=probs.device)
    beyond = rank >= info.top_ks.view(-1, 1)
    weights = ordered
    if sequential:
        weights = weights.masked_fill(beyond, 0.0)
        weights = weights / weights.sum(-1, keepdim=True)
    before = weights.cumsum(-1) - weights
    kept = weights.masked_fill(beyond | (before > info.top_ps.view(-1, 1)), 0.0)
    if info.need_min_p_sampling:
        kept = kept.masked_fill(kept < kept[:, :1] * info.min_ps.view(-1, 1), 0.0)
    return torch.zeros_like(probs).scatter_(1, tokens, kept)
