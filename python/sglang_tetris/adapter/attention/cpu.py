"""Attention backend ``tetris_cpu``: every forward mode of an MHA model on a CPU.

``init_forward_metadata`` turns a batch into one ``AttentionPlan``; each layer then
writes its keys and values and attends over the plan. In target-verify mode the batch's
``spec_info`` may carry ``verify_lens`` (``[bs]``, rows per request; otherwise every
request has ``draft_token_num``) and ``custom_mask`` in QLEN_ONLY layout (None: a
chain). The verify rows' slots are ``out_cache_loc``, in row order. A draft's backend
may be given ``kv_starts`` (by row of ``req_to_token``): positions below hold no draft
keys and are not attended to.
"""

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_tetris.adapter.attention import cpu_native, cpu_plan, cpu_torch
from sglang_tetris.adapter.attention.cpu_native import NativePlan
from sglang_tetris.adapter.attention.cpu_plan import AttentionPlan


class CpuAttentionBackend(AttentionBackend):
    """See the module docstring."""

    # Lengths live on the host anyway; the scheduler need not mirror them.
    needs_cpu_seq_lens = False

    def __init__(self, model_runner: object) -> None:
        super().__init__()
        if model_runner.use_mla_backend:
            raise ValueError("attention backend tetris_cpu does not support MLA models")
        self.device = model_runner.device
        self.max_context_len = model_runner.model_config.context_len
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.has_native = cpu_native.is_available()
        self.forward_metadata: AttentionPlan | None = None
        self._native_plan: NativePlan | None = None
        self.kv_starts: torch.Tensor | None = None

    def init_forward_metadata(self, forward_batch: object) -> None:
        self.set_plan(self._plan(forward_batch))

    def set_plan(self, plan: AttentionPlan | None) -> None:
        """Let the next forward run over ``plan``."""
        self.forward_metadata = plan
        self._native_plan = None

    def _plan(self, batch: object) -> AttentionPlan | None:
        mode = batch.forward_mode
        if mode.is_idle():
            return None
        if mode.is_decode():
            return cpu_plan.decode_plan(
                req_rows=batch.req_pool_indices,
                seq_lens=batch.seq_lens,
                slots=batch.out_cache_loc,
            )
        if mode.is_target_verify():
            return self._verify_plan(batch)
        return cpu_plan.extend_plan(
            req_rows=batch.req_pool_indices,
            prefix_lens=batch.extend_prefix_lens,
            extend_lens=batch.extend_seq_lens,
            slots=batch.out_cache_loc,
            prefix_starts=_starts_of(self.kv_starts, batch),
        )

    def _verify_plan(self, batch: object) -> AttentionPlan:
        spec_info = batch.spec_info
        # Only a ragged verify input has the attribute.
        verify_lens = getattr(spec_info, "verify_lens", None)
        if verify_lens is None:
            verify_lens = torch.full((batch.batch_size,), spec_info.draft_token_num)
        return cpu_plan.verify_plan(
            req_rows=batch.req_pool_indices,
            prefix_lens=batch.seq_lens,
            verify_lens=verify_lens,
            slots=batch.out_cache_loc,
            positions=batch.positions,
            mask=spec_info.custom_mask,
        )

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def _attend(self, q, k, v, layer, forward_batch, save_kv_cache):
        if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
            raise ValueError(
                "attention backend tetris_cpu supports causal self-attention only, "
                f"not {layer.attn_type} (cross attention: {layer.is_cross_attention})"
            )
        plan = self.forward_metadata
        slot_map = self._slot_map(layer.layer_id)
        k_cache, v_cache = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        options = {
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "req_to_token": self.req_to_token_pool.req_to_token,
            "scaling": layer.scaling,
            "window": layer.sliding_window_size,
            "slot_map": slot_map,
        }
        saves = save_kv_cache and k is not None
        if self._use_native(layer, q, k_cache):
            new_kv = None
            if saves:
                new_kv = (_rows_of(k, k_cache), _rows_of(v, v_cache))
                new_kv += (forward_batch.out_cache_loc.contiguous(),)
            out = self._native(q.shape[1] // k_cache.shape[1]).attend(
                new_kv=new_kv, **options
            )
        else:
            if saves:
                slots = forward_batch.out_cache_loc
                if slot_map is not None:
                    slots = slot_map[slots]
                cpu_torch.store_kv(
                    k=k, v=v, k_cache=k_cache, v_cache=v_cache, slots=slots
                )
            out = cpu_torch.paged_attention(plan, logit_cap=layer.logit_cap, **options)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _use_native(self, layer, q: torch.Tensor, k_cache: torch.Tensor) -> bool:
        return self.has_native and cpu_native.supports(
            row_dtype=q.dtype,
            cache_dtype=k_cache.dtype,
            num_q_heads=layer.tp_q_head_num,
            num_kv_heads=layer.tp_k_head_num,
            dim=layer.qk_head_dim,
            v_dim=layer.v_head_dim,
            logit_cap=layer.logit_cap,
        )

    def _native(self, share: int) -> NativePlan:
        # All layers of a model have one head ratio, so one plan serves them.
        if self._native_plan is None or self._native_plan.share != share:
            self._native_plan = NativePlan(self.forward_metadata, share=share)
        return self._native_plan

    def _slot_map(self, layer_id: int) -> torch.Tensor | None:
        pool = self.token_to_kv_pool
        if isinstance(pool, SWAKVPool) and pool.layers_mapping[layer_id][1]:
            return pool.full_to_swa_index_mapping
        return None

    def support_triton(self) -> bool:
        return False


class CpuMultiStepDraftBackend:
    """One backend per draft decode step, as SGLang's draft worker expects."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: object, topk: int, num_steps: int) -> None:
        self.topk = topk
        self.num_steps = num_steps
        self.kv_starts: torch.Tensor | None = None
        self.attn_backends = [
            CpuAttentionBackend(model_runner) for _ in range(num_steps - 1)
        ]

    def init_forward_metadata(self, forward_batch: object) -> None:
        branch_slots = forward_batch.out_cache_loc.view(
            forward_batch.batch_size, self.topk, self.num_steps
        )
        prefix_starts = _starts_of(self.kv_starts, forward_batch)
        for step, backend in enumerate(self.attn_backends):
            backend.set_plan(
                cpu_plan.draft_decode_plan(
                    req_rows=forward_batch.req_pool_indices,
                    prefix_lens=forward_batch.seq_lens,
                    branch_slots=branch_slots,
                    step=step,
                    prefix_starts=prefix_starts,
                )
            )


def _starts_of(starts: torch.Tensor | None, batch: object) -> torch.Tensor | None:
    """First position with a valid key, per request of the batch; None: all are."""
    return None if starts is None else starts[batch.req_pool_indices.to(torch.int64)]


def _rows_of(new: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """``new`` in the cache's dtype, each row contiguous as the kernel copies it."""
    new = new.to(cache.dtype)
    if new.stride()[1:] != (new.shape[2], 1):
        new = new.contiguous()
    return new
