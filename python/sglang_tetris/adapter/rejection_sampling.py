"""`rejection` verification of sampled chains: accepts drafts by probability.

At every verified row the law is computed that plain decoding would sample from there,
as if the drafts before it had been emitted; core.rejection does the rest, exactly. A
round that drafted nothing, or only greedy requests, needs no laws: there the target's
own token decides (sampling.py).
"""

from typing import Any

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_tetris.adapter.penalties import PenaltyState
from sglang_tetris.adapter.sampled_chains import ChainSampler
from sglang_tetris.adapter.sampling import grammars_of, processed_rows, roll_back
from sglang_tetris.adapter.target_law import target_law
from sglang_tetris.core import AcceptResult, VerifyPlan, verify_chains
from sglang_tetris.core.config import TetrisConfig


class RejectionSampler:
    """Accepts the drafts of a verified batch of chains.

    block                verify the drafts of a chain together
    one_after_the_other  SGLang's sampler applies top-k, top-p and min-p in turn
    """

    def __init__(
        self,
        chains: ChainSampler,
        penalties: PenaltyState,
        *,
        block: bool,
        one_after_the_other: bool,
    ) -> None:
        self._chains = chains
        self._penalties = penalties
        self._block = block
        self._in_turn = one_after_the_other
        self._biased = False

    def plant_bias(self, on: Any) -> None:
        """End rounds with the first possible token: a bias that tests must find."""
        self._biased = bool(on)

    def accept(
        self,
        plan: VerifyPlan,
        logits: torch.Tensor,
        info: SamplingBatchInfo,
        reqs: list[Any],
        draft_probs: torch.Tensor,
        *,
        keep_logits: bool,
    ) -> tuple[AcceptResult, list[int]]:
        """Return the accepted part of each chain and the tokens to emit.

        Beside it the requests whose grammar a draft would end.

        logits       [T, vocab], the target's; with keep_logits replaced by processed
        draft_probs  [bs, N, Vd], the laws that the drafts were drawn from
        """
        ended: list[int] = []
        target_probs = self._target_probs(plan, logits, info, reqs, keep_logits, ended)
        bs, num_laws = draft_probs.shape[:2]
        accepted = verify_chains(
            plan,
            target_probs=target_probs,
            draft_probs=draft_probs,
            uniforms=self._chains.uniforms(bs, num_laws),
            uniforms_final=self._chains.uniforms(bs) * (not self._biased),
            draft_token_ids=self._chains.token_ids,
            block=self._block,
        )
        return accepted, ended

    def _target_probs(
        self,
        plan: VerifyPlan,
        logits: torch.Tensor,
        info: SamplingBatchInfo,
        reqs: list[Any],
        keep_logits: bool,
        ended: list[int],
    ) -> torch.Tensor:
        """The target's law at every row, `[T, vocab]` float32.

        Row by row along the chains, since penalties and grammars depend on the drafts
        before. A draft that cannot be emitted ends its chain: what would follow it is
        never reached, and gets token 0 for certain.
        """
        penalties, grammars = self._penalties.begin(reqs), grammars_of(reqs)
        probs = torch.zeros_like(logits, dtype=torch.float32)
        probs[:, 0] = 1.0
        requests = torch.arange(plan.batch_size, device=logits.device)
        advanced = [0] * plan.batch_size
        try:
            for place in range(plan.retrieve_index.shape[1]):
                rows = plan.retrieve_index[requests, place]
                requests, rows = requests[rows >= 0], rows[rows >= 0]
                if not rows.numel():
                    break
                if place:
                    tokens = plan.input_ids[rows]
                    before = plan.retrieve_index[requests, place - 1]
                    possible = probs[before, tokens] > 0
                    requests, rows = requests[possible], rows[possible]
                    tokens = tokens[possible]
                    if penalties is not None:
                        penalties.emit(requests, tokens)
                    if grammars is not None:
                        goes_on = _advance(grammars, requests, tokens, advanced)
                        ended += requests[~goes_on].tolist()
                        requests, rows = requests[goes_on], rows[goes_on]
                    if not rows.numel():
                        break
                level, chosen = processed_rows(
                    logits, rows, requests, info, penalties, grammars
                )
                if level.has_custom_logit_processor:
                    apply_custom_logit_processor(chosen, level)
                if keep_logits:
                    logits[rows] = chosen
                probs[rows] = target_law(
                    chosen, level, one_after_the_other=self._in_turn
                )
        finally:
            roll_back(grammars, advanced)
        return probs


def _advance(
    grammars: list[Any],
    requests: torch.Tensor,
    tokens: torch.Tensor,
    advanced: list[int],
) -> torch.Tensor:
    """Move the matchers over one draft each; return which grammars go on, `[n]`."""
    goes_on = []
    for request, token in zip(requests.tolist(), tokens.tolist(), strict=True):
        grammar = grammars[request]
        if grammar is not None:
            grammar.accept_token(token)
            advanced[request] += 1
        goes_on.append(grammar is None or not grammar.is_terminated())
    return torch.tensor(goes_on, dtype=torch.bool, device=requests.device)


def make_rejection(
    config: TetrisConfig, draft_worker: Any, penalties: PenaltyState
) -> RejectionSampler:
    """Let the draft worker draw its tokens, and return what verifies them."""
    runner = draft_worker.target_worker.model_runner
    chains = ChainSampler(
        seed=draft_worker.target_worker.random_seed,
        device=draft_worker.device,
        rule=config.value_rule,
        token_ids=draft_worker.hot_token_id,
        vocab_size=runner.model_config.vocab_size,
    )
    draft_worker.sampler = chains
    return RejectionSampler(
        chains,
        penalties,
        block=config.block_verification,
        one_after_the_other=get_exec().kernel.sampling_backend == "flashinfer",
    )
