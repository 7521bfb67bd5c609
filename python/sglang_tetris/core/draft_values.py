"""What a sampled draft position is worth verifying, judged before its token is seen.

    max_draft_prob   max over x of q(x)       probability of the likeliest token
    sum_square       sum over x of q(x) ** 2  mean probability of the drawn token

q is the recorded law of the position: the one its token was drawn from, given the
tokens before it. The values become `accept_probs` of a DraftTrees.

Rejection verification corrects for q on the understanding that a verified token was
drawn from q. A value that looks at the token breaks that: where likely tokens are
verified and unlikely ones trimmed, the verified ones follow q given "likely", and the
output is no longer the target's. So q(x) of the drawn x is not offered here, and
neither is anything computed from it or from a later token. Any function of the law
alone will do, a calibrated value too; these two also keep more correct drafts than the
token's own probability. `match` verification has no such bound: nothing about the draft
can change its output.

Not decided here: how many positions are verified (core.budget, core.lagged_budget).
"""

import torch

from sglang_tetris.core.errors import check_tensor

_FLOATS = (torch.float32, torch.float64)


def max_draft_prob(draft_probs: torch.Tensor) -> torch.Tensor:
    """Return the largest probability of each recorded law.

    draft_probs `[bs, D, V]` float32 or float64, on the draft's own vocabulary if it has
    one. Returns `[bs, D]` float32 in [0, 1]. Raises ValueError for another shape or
    dtype, or an empty vocabulary.
    """
    _check_laws(draft_probs)
    return draft_probs.amax(-1).clamp(max=1.0).to(torch.float32)


def sum_square(draft_probs: torch.Tensor) -> torch.Tensor:
    """Return the sum of each recorded law's squares; as `max_draft_prob` otherwise."""
    _check_laws(draft_probs)
    return draft_probs.square().sum(-1).clamp(max=1.0).to(torch.float32)


def _check_laws(draft_probs: torch.Tensor) -> None:
    check_tensor("draft_probs", draft_probs, "[bs, D, V]", (-1, -1, -1), _FLOATS)
    if draft_probs.shape[-1] == 0:
        raise ValueError(
            "draft_probs must have a token in its vocabulary, got shape "
            f"{list(draft_probs.shape)}"
        )
