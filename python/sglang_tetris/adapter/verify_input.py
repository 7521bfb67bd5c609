"""The two ragged inputs of a round, as SGLang's attention backends read them.

A round runs the target over sum(verify_lens) rows and the draft over sum(accept_lens)
rows; each request has its own number. Both inputs answer FlashInfer's question
`generate_attn_arg_prefill` with

    qo_indptr = [0, cumsum(rows)],  kv_indptr = [0, cumsum(tokens read)],
    kv_indices = slots of the tokens read, custom mask = flat bool or None

The CPU backend reads `verify_lens` and the square masks instead.
"""

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleVerifyInput

from sglang_tetris.core import VerifyPlan

AttnArgs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass
class TetrisVerifyInput(EagleVerifyInput):
    """The target's forward over a `VerifyPlan`.

    custom_mask holds the plan's square tree masks; the wide mask over prefix and tree
    is made only when a backend asks for it.
    """

    plan: VerifyPlan | None = None

    @classmethod
    def from_plan(
        cls, plan: VerifyPlan, *, num_steps: int, topk: int, capture_hidden_mode: Any
    ) -> "TetrisVerifyInput":
        return cls(
            draft_token=plan.input_ids,
            custom_mask=plan.tree_mask,
            positions=plan.positions,
            retrieve_index=plan.retrieve_index,
            retrieve_next_token=plan.retrieve_next_token,
            retrieve_next_sibling=plan.retrieve_next_sibling,
            retrieve_cum_len=None,
            spec_steps=num_steps,
            topk=topk,
            # The widest request: bounds what a reader may look at past seq_lens.
            draft_token_num=plan.retrieve_index.shape[1],
            capture_hidden_mode=capture_hidden_mode,
            seq_lens_sum=None,
            seq_lens_cpu=None,
            plan=plan,
        )

    @property
    def verify_lens(self) -> torch.Tensor:
        """`[bs]` int32, rows per request, anchor included."""
        return self.plan.verify_lens

    def generate_attn_arg_prefill(
        self,
        *,
        req_pool_indices: torch.Tensor,
        paged_kernel_lens: torch.Tensor,
        paged_kernel_lens_sum: int,
        translator: Any,
        plan: Any,
        kind: IdSpaceKind = IdSpaceKind.FULL,
    ) -> AttnArgs:
        """Return (kv_indices, kv_indptr, qo_indptr, custom_mask), all ragged.

        `paged_kernel_lens` counts the prefix only; each request reads its own verify
        rows as well.
        """
        num_rows = self.plan.input_ids.shape[0]
        kv_indices, kv_indptr = _pack_reads(
            paged_kernel_lens + self.verify_lens,
            paged_kernel_lens_sum + num_rows,
            paged_kernel_lens_sum,
            req_pool_indices=req_pool_indices,
            translator=translator,
            plan=plan,
            kind=kind,
        )
        return kv_indices, kv_indptr, self.plan.qo_indptr, self.plan.custom_mask()


@dataclass
class TetrisDraftExtendInput(EagleDraftExtendInput):
    """The draft's forward over the tokens a round has accepted, ragged.

    extend_indptr  [bs + 1] int32, where each request's rows begin
    """

    extend_indptr: torch.Tensor | None = None

    def generate_attn_arg_prefill(
        self,
        *,
        req_pool_indices: torch.Tensor,
        paged_kernel_lens: torch.Tensor,
        paged_kernel_lens_sum: int | None,
        translator: Any,
        plan: Any,
        kind: IdSpaceKind = IdSpaceKind.FULL,
    ) -> AttnArgs:
        """Return (kv_indices, kv_indptr, qo_indptr, None): plain causal rows.

        `paged_kernel_lens` counts the new rows already.
        """
        total = paged_kernel_lens_sum
        if total is None:
            total = int(paged_kernel_lens.sum())
        kv_indices, kv_indptr = _pack_reads(
            paged_kernel_lens,
            total,
            total,
            req_pool_indices=req_pool_indices,
            translator=translator,
            plan=plan,
            kind=kind,
        )
        return kv_indices, kv_indptr, self.extend_indptr, None


def _pack_reads(
    kv_lens: torch.Tensor,
    num_indices: int,
    kv_lens_sum: int,
    *,
    req_pool_indices: torch.Tensor,
    translator: Any,
    plan: Any,
    kind: IdSpaceKind,
) -> tuple[torch.Tensor, torch.Tensor]:
    device = req_pool_indices.device
    kv_indptr = torch.zeros(kv_lens.shape[0] + 1, dtype=torch.int32, device=device)
    kv_indptr[1:] = kv_lens.cumsum(0)
    kv_indices = torch.empty(num_indices, dtype=torch.int32, device=device)
    translator.pack_read_stream(
        plan,
        req_pool_indices=req_pool_indices,
        seq_lens=kv_lens,
        indptr=kv_indptr,
        out=kv_indices,
        kind=kind,
        num_token_blocks=None,
        kv_lens_sum=kv_lens_sum,
    )
    return kv_indices, kv_indptr
