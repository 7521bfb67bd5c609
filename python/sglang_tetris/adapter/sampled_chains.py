"""Drafting for `rejection` verification: chains whose tokens are drawn.

A position's token is drawn from the draft's law at the request's temperature (the
arg-max of a greedy request), and the law is kept: verification corrects for it, and the
position's value is computed from it, not from the token (core.draft_values). Level 0's
law travels with the request from round to round, as SGLang's `draft_probs`.
"""

from typing import Any

import torch

from sglang_tetris.adapter.target_law import finite
from sglang_tetris.core import DraftTrees, max_draft_prob, sum_square
from sglang_tetris.core.config import ValueRule


class ChainSampler:
    """Draws draft tokens; every rank of a group draws the same.

    seed       of the generator, which nothing else uses
    token_ids  `[Vd]`, the target's ids of the draft's tokens, or None for all
    law_size   Vd
    """

    def __init__(
        self,
        *,
        seed: int,
        device: str,
        rule: ValueRule,
        token_ids: torch.Tensor | None,
        vocab_size: int,
    ) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._rule = sum_square if rule == "square" else max_draft_prob
        self.token_ids = token_ids
        self.law_size = vocab_size if token_ids is None else len(token_ids)

    def uniforms(self, *shape: int) -> torch.Tensor:
        """Return float64 uniforms in [0, 1)."""
        return torch.rand(
            shape,
            generator=self._generator,
            dtype=torch.float64,
            device=self._generator.device,
        )

    def law(self, logits: torch.Tensor, info: Any) -> torch.Tensor:
        """Return the law `[rows, Vd]` float32 of the next token, from draft logits.

        info  SGLang's sampling parameters of the rows' requests. A draft that yields
              NaN draws evenly: its tokens are as good as any.
        """
        logits = finite(logits)
        law = torch.softmax(logits / info.temperatures, dim=-1)
        if info.is_any_greedy:
            greedy = info.top_ks.view(-1, 1) == 1
            best = torch.zeros_like(law).scatter_(
                1, logits.argmax(-1, keepdim=True), 1.0
            )
            law = torch.where(greedy, best, law)
        return law

    def draw(self, law: torch.Tensor) -> torch.Tensor:
        """Return a token per row of `[rows, Vd]`, as the target's id, `[rows]`."""
        # By inversion, in float64, from this generator alone.
        ends = law.to(torch.float64).cumsum(-1)
        point = self.uniforms(law.shape[0]).unsqueeze(1) * ends[:, -1:]
        # A token of probability 0 ends where the one before it does: never the first.
        index = (ends > point).to(torch.uint8).argmax(-1)
        return index if self.token_ids is None else self.token_ids[index]

    def chains(
        self, tokens: list[torch.Tensor], laws: list[torch.Tensor]
    ) -> DraftTrees:
        """Return the chains of `[bs]` tokens per level; values come from the laws."""
        bs, depth = tokens[0].shape[0], len(tokens)
        device = tokens[0].device
        return DraftTrees(
            tokens=torch.stack(tokens, 1),
            parents=torch.arange(-1, depth - 1, device=device).repeat(bs, 1),
            accept_probs=self._rule(torch.stack(laws, 1)),
            num_nodes=torch.full((bs,), depth, device=device),
            max_depth=depth,
        )
