"""Accepts sampled drafts by probability (`rejection` verification), for chains.

Drafts x_1 .. x_n of a request were drawn from recorded laws q_1 .. q_n; the target's
laws at the anchor and after each draft are p_1 .. p_{n+1}; n is what was verified.

    token   x_j is accepted with probability min(1, p_j(x_j) / q_j(x_j)), one after the
            other up to the first that is not; m are accepted; w_j = 1
    block   w_0 = 1,   w_j = min(1, w_{j-1} p_j(x_j) / q_j(x_j))
            e_j = sum over x of (w_j p_{j+1}(x) - q_{j+1}(x))+
            h_j = e_j / (e_j + 1 - w_j) for j < n,   h_n = w_n
            each j has a coin of its own that falls with probability h_j; m is the last
            j whose coin fell, 0 if none did (Sun et al., arXiv 2403.10444)
    final   one more token, from p_{n+1} if m = n, and otherwise from
            (w_m p_{m+1} - q_{m+1})+ normalised

Exact, trimming included. Let F_n(x_1 .. x_n) be the law of the whole text if n drafts
are verified and the target goes on after the final token. F_0 is the target's law, and
the mean of F_{n+1} over x_{n+1} from q_{n+1} is F_n. With w = w_n, p and q those of
place n + 1, and e = e_n:

    token   the two differ only where x_1 .. x_n are accepted, and there in the next
            token: p in F_n; in F_{n+1} min(p, q) accepted and (p - q)+ drawn, so p
    block   F_n: the coin of n falls with probability w, and the next token has law p.
            F_{n+1}: the next token is accepted with min(w p, q). With 1 - w + e it is
            not; then the coin of n falls with e / (e + 1 - w), and (w p - q)+ / e is
            drawn. Together w p again. With 1 - w, in both, the coins below n decide.

So one more draft changes no mean, provided that whether to verify it was settled
before it was drawn, and without the coins: n must be a stopping time of the drafts. For
several requests the same holds of the product of their F. The order of the allocator
with values from the laws alone (core.draft_values) and a budget known before the step
(core.lagged_budget) give such n; the drawn token's own probability does not. The block
rule accepts at least as many drafts in the mean as the token rule.

Sampled trees are not handled, and who draws the uniforms is not decided here.
"""

import torch

from sglang_tetris.core.errors import on_plain_cpu
from sglang_tetris.core.rejection_checks import (
    check_drawn_host,
    check_shapes,
    check_values_host,
)
from sglang_tetris.core.types import AcceptResult, VerifyPlan

# Tokens that are added up before one of them is looked for.
_CHUNK = 256
_BELOW_ONE = 1 - 2.0**-53


def verify_chains(
    plan: VerifyPlan,
    *,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    uniforms: torch.Tensor,
    uniforms_final: torch.Tensor,
    draft_token_ids: torch.Tensor | None = None,
    block: bool = False,
) -> AcceptResult:
    """Accept drafts of sampled chains and draw the token after them, exactly.

    plan             chains, trimmed or not: place j holds the chain's j-th draft
    target_probs     [T, V] float32 or float64, the target's law at every row of the
                     plan; one-hot for a greedy request, which is then matched
    draft_probs      [bs, N, Vd], same dtype, the law that each draft was drawn from;
                     N >= plan.max_depth
    uniforms         [bs, N] float64 in [0, 1), one coin per draft
    uniforms_final   [bs] float64 in [0, 1), for the token drawn at the end, by the
                     inverse of the distribution function, tokens in ascending order
    draft_token_ids  [Vd] int64, distinct, the target's id of each token that the draft
                     knows; None = the same vocabulary, Vd = V
    block            the block rule instead of the token rule

    Returns an AcceptResult over the plan's rows, D = plan.max_depth. Laws at padded
    rows and at drafts that were not verified are ignored. Whole laws and their sums are
    computed in the laws' dtype, single drafts, coins and the distribution function in
    float64: the 24 bits of a float32 uniform would show in a wide flat law. Laws need
    to add up to 1 only to rounding. A residual that rounding left empty is replaced by
    the target's law; a token of probability 0 is never drawn. The result depends on the
    arguments alone. Nothing waits for an accelerator.

    Raises ValueError naming the argument and its value for a wrong shape, dtype or
    device; on a CPU also for a plan of trees, a law that does not add up to 1, a
    verified draft that its law cannot have drawn (on an accelerator it is rejected),
    uniforms outside [0, 1), tokens or ids outside the vocabulary and ids given twice.
    """
    check_shapes(
        plan, target_probs, draft_probs, uniforms, uniforms_final, draft_token_ids
    )
    depth = plan.max_depth
    # Rows that a bound set too low has cut off are not there to be read.
    row_at = plan.retrieve_index[:, : depth + 1]
    row_at = torch.where(row_at < target_probs.shape[0], row_at, -1)
    if plan.batch_size == 0:
        return _result(row_at, row_at[:, 1:], row_at[:, 0], row_at[:, 0])
    on_cpu = on_plain_cpu(target_probs)
    if on_cpu:
        check_values_host(
            plan, target_probs, draft_probs, uniforms, uniforms_final, draft_token_ids
        )
    rows = row_at.clamp(min=0)
    laws = _Laws(target_probs, draft_probs, rows, draft_token_ids)
    tokens = plan.input_ids[rows[:, 1:]]
    verified = row_at[:, 1:] >= 0
    drawn_from = laws.draft_probs_of(tokens)
    uniforms = uniforms[:, :depth]
    if on_cpu:
        check_drawn_host(drawn_from, verified)
    # A draft that was not verified, or cannot have been drawn, has no chance at all.
    possible = verified & (drawn_from > 0)
    likelihood = torch.where(possible, laws.target_probs_of(tokens), 0.0)
    drawn_from = torch.where(possible, drawn_from, 1.0)
    if block:
        num_correct, weight = _accept_block(
            laws, likelihood, drawn_from, verified, uniforms
        )
    else:
        accepted = uniforms * drawn_from < likelihood
        num_correct = accepted.to(torch.int64).cumprod(1).sum(1)
        weight = torch.ones_like(uniforms_final)
    rejected = num_correct < verified.sum(1)
    final = _draw(laws.after(num_correct, weight, rejected), uniforms_final)
    return _result(row_at, tokens, num_correct, final)


class _Laws:
    """The laws at each place of the chains: p of place j is what follows j drafts.

    target_probs [T, V]; draft_probs [bs, N, Vd], q of place j at [:, j]; rows
    [bs, D + 1], the flat row at each place; draft_token_ids [Vd] or None.
    """

    def __init__(
        self,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor,
        rows: torch.Tensor,
        draft_token_ids: torch.Tensor | None,
    ) -> None:
        self._target_probs = target_probs
        self._draft_probs = draft_probs
        self._rows = rows
        self._ids = draft_token_ids

    def target_probs_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Probability of each draft under the target, `[bs, D]` float64."""
        return self._target_probs[self._rows[:, :-1], tokens].to(torch.float64)

    def draft_probs_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Probability of each draft under its own law, `[bs, D]` float64."""
        index = tokens
        if self._ids is not None:
            known = torch.arange(self._ids.shape[0], device=tokens.device)
            place_of = tokens.new_full((self._target_probs.shape[1],), -1)
            index = place_of.scatter_(0, self._ids, known)[tokens]
        probs = self._draft_probs[:, : tokens.shape[1]]
        probs = probs.gather(2, index.clamp(min=0)[:, :, None]).squeeze(2)
        return torch.where(index >= 0, probs, 0.0).to(torch.float64)

    def excess(self, place: int, weight: torch.Tensor) -> torch.Tensor:
        """(weight p - q)+ at a place, `[bs, V]`; weight `[bs]`."""
        return self._excess(self._rows[:, place], self._draft_probs[:, place], weight)

    def after(
        self, num_correct: torch.Tensor, weight: torch.Tensor, rejected: torch.Tensor
    ) -> torch.Tensor:
        """What the final token is drawn from, not normalised, `[bs, V]`.

        The excess where a verified draft was `rejected`, otherwise p.
        """
        rows = self._rows.gather(1, num_correct[:, None]).squeeze(1)
        target = self._target_probs.index_select(0, rows)
        bs, drafts = self._draft_probs.shape[:2]
        if drafts == 0:
            return target
        first = torch.arange(bs, device=rows.device) * drafts
        draft = self._draft_probs.flatten(0, 1).index_select(
            0, first + num_correct.clamp(max=drafts - 1)
        )
        excess = self._excess(rows, draft, weight)
        usable = rejected & (excess.sum(1) > 0)
        return torch.where(usable[:, None], excess, target)

    def _excess(
        self, rows: torch.Tensor, draft: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        scaled = self._target_probs.index_select(0, rows)
        scaled *= weight[:, None].to(scaled.dtype)
        if self._ids is None:
            return scaled.sub_(draft).clamp_(min=0)
        # The draft gives nothing to the tokens that it does not know.
        ids = self._ids.expand_as(draft)
        known = scaled.gather(1, ids).sub_(draft).clamp_(min=0)
        return scaled.scatter_(1, ids, known)


def _accept_block(
    laws: _Laws,
    likelihood: torch.Tensor,
    drawn_from: torch.Tensor,
    verified: torch.Tensor,
    uniforms: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The block rule: m, `[bs]` int64, and w_m, `[bs]` float64.

    likelihood and drawn_from are the drafts' probabilities under p and q, `[bs, D]`.
    """
    bs, depth = verified.shape
    weight = uniforms.new_ones(bs)
    num_correct, kept_weight = verified.new_zeros(bs, dtype=torch.int64), weight
    for place in range(1, depth + 1):
        weight = weight * likelihood[:, place - 1] / drawn_from[:, place - 1]
        weight = weight.clamp(max=1.0)
        coin = uniforms[:, place - 1]
        falls = coin < weight
        if place < depth:
            excess = laws.excess(place, weight).sum(1).to(torch.float64)
            whole = excess + (1 - weight)
            # whole = 0: what follows is accepted for certain, and so is this.
            inner = (coin * whole < excess) | (whole <= 0)
            falls = torch.where(verified[:, place], inner, falls)
        falls = falls & verified[:, place - 1]
        num_correct = torch.where(falls, place, num_correct)
        kept_weight = torch.where(falls, weight, kept_weight)
    return num_correct, kept_weight


def _draw(law: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw a token from each row of `[bs, V]`, not normalised, by inversion."""
    spare = -law.shape[1] % _CHUNK
    padded = torch.nn.functional.pad(law, (0, spare)) if spare else law
    chunks = padded.view(law.shape[0], -1, _CHUNK)
    # To add up chunks and then look into one is a single pass over the vocabulary.
    chunk, inside = _invert(chunks.sum(2), uniforms)
    requests = torch.arange(law.shape[0], device=law.device)
    place, _ = _invert(chunks[requests, chunk], inside)
    return chunk * _CHUNK + place


def _invert(
    law: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a uniform falls in each row of `[bs, K]`, and how far into that entry.

    Both `[bs]`; the second is in [0, 1) and uniform there, as the uniform was.
    """
    law = law.to(torch.float64)
    # A scan in parallel may round up at an entry of 0: none is chosen.
    ends = torch.where(law > 0, law.cumsum(1), 0.0)
    point = uniforms[:, None] * ends.amax(1, keepdim=True)
    index = (ends > point).to(torch.uint8).argmax(1, keepdim=True)
    share = law.gather(1, index)
    inside = (point - (ends.gather(1, index) - share)) / share
    return index.squeeze(1), inside.squeeze(1).clamp(0.0, _BELOW_ONE)


def _result(
    row_at: torch.Tensor,
    tokens: torch.Tensor,
    num_correct: torch.Tensor,
    final: torch.Tensor,
) -> AcceptResult:
    """The first `num_correct` drafts and then the final token, over the plan's rows."""
    place = torch.arange(row_at.shape[1], device=row_at.device)
    emitted = torch.nn.functional.pad(tokens, (0, 1))
    last = num_correct[:, None]
    emitted = torch.where(place == last, final[:, None], emitted)
    accept_index = torch.where(place <= last, row_at, -1)
    return AcceptResult(
        accept_index=accept_index.to(torch.int32),
        accept_lens=(accept_index >= 0).sum(1, dtype=torch.int32),
        accept_tokens=torch.where(accept_index >= 0, emitted, -1),
    )
