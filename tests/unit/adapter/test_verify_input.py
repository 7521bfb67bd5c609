"""FlashInfer's arrays, read in plain torch, attend as the CPU backend does.

Without a GPU this is what shows that the ragged `kv_indices, kv_indptr, qo_indptr,
custom_mask` mean the same batch: each request's rows are computed from those arrays
alone and compared with the CPU backend's attention over the same plan.
"""

import pytest
import torch

pytest.importorskip("sglang", reason="the adapter needs SGLang")

from sglang_tetris.adapter.attention import cpu_plan, cpu_torch
from sglang_tetris.adapter.verify_input import (
    TetrisDraftExtendInput,
    TetrisVerifyInput,
)
from sglang_tetris.core import DraftTrees, build_verify_plan, select_draft_tokens

BS, NODES, HEADS, KV_HEADS, DIM, SLOTS = 5, 7, 4, 2, 8, 512
PREFIX = torch.tensor([3, 0, 17, 30, 8])


class _Translator:
    """Packs slots as SGLang's translator does for an untranslated pool."""

    def __init__(self, req_to_token: torch.Tensor) -> None:
        self._table = req_to_token

    def pack_read_stream(
        self, plan, *, req_pool_indices, seq_lens, indptr, out, kind, **_
    ) -> bool:
        for request, row in enumerate(req_pool_indices.tolist()):
            begin, end = indptr[request], indptr[request + 1]
            assert end - begin == seq_lens[request]
            out[begin:end] = self._table[row, : end - begin]
        return False


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(5)
    table = torch.randperm(SLOTS, generator=generator)[: 8 * 60].view(8, 60)
    rows = torch.tensor([6, 1, 3, 0, 5])
    caches = [torch.randn(SLOTS, KV_HEADS, DIM, generator=generator) for _ in "kv"]
    return table, rows, caches, generator


def _trees(generator: torch.Generator) -> DraftTrees:
    parents = torch.full((BS, NODES), -1)
    for node in range(NODES):
        parents[:, node] = torch.randint(-1, max(node, 1), (BS,), generator=generator)
    parents = torch.minimum(parents, torch.arange(NODES) - 1)
    return DraftTrees(
        tokens=torch.randint(0, 99, (BS, NODES), generator=generator),
        parents=parents,
        accept_probs=torch.rand(BS, NODES, generator=generator),
        num_nodes=torch.tensor([7, 0, 5, 7, 3]),
    )


def _attend(q, caches, kv_indices, kv_indptr, qo_indptr, mask):
    """Attention as FlashInfer's page describes its arrays, request by request."""
    out, begin = torch.empty_like(q), 0
    for request in range(len(qo_indptr) - 1):
        rows = slice(int(qo_indptr[request]), int(qo_indptr[request + 1]))
        slots = kv_indices[kv_indptr[request] : kv_indptr[request + 1]].long()
        num_rows, num_keys = rows.stop - rows.start, len(slots)
        if mask is None:
            allowed = torch.ones(num_rows, num_keys).tril(num_keys - num_rows).bool()
        else:
            end = begin + num_rows * num_keys
            allowed = mask[begin:end].view(num_rows, num_keys)
            begin = end
        keys, values = (
            cache[slots].repeat_interleave(HEADS // KV_HEADS, 1) for cache in caches
        )
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * DIM**-0.5
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values)
    assert mask is None or begin == len(mask), "the mask has exactly these elements"
    return out


@pytest.mark.parametrize("budget", [0, 4, 13, 99])
def test_verify_arrays_equal_the_cpu_backend(batch, budget: int) -> None:
    table, rows, caches, generator = batch
    trees = _trees(generator)
    plan = build_verify_plan(
        trees,
        select_draft_tokens(trees, draft_budget=budget),
        anchors=torch.zeros(BS, dtype=torch.int64),
        prefix_lens=PREFIX,
    )
    info = TetrisVerifyInput.from_plan(
        plan, num_steps=NODES, topk=2, capture_hidden_mode=None
    )
    kv_indices, kv_indptr, qo_indptr, mask = info.generate_attn_arg_prefill(
        req_pool_indices=rows,
        paged_kernel_lens=PREFIX,
        paged_kernel_lens_sum=int(PREFIX.sum()),
        translator=_Translator(table),
        plan=None,
    )
    assert {kv_indices.dtype, kv_indptr.dtype, qo_indptr.dtype} == {torch.int32}
    num_rows = len(plan.input_ids)
    assert len(kv_indices) == int(PREFIX.sum()) + num_rows
    q = torch.randn(num_rows, HEADS, DIM, generator=generator)
    lens = plan.verify_lens.long()
    slots = torch.cat(
        [
            table[row, start : start + count]
            for row, start, count in zip(rows, PREFIX, lens, strict=True)
        ]
    )
    expected = cpu_torch.paged_attention(
        cpu_plan.verify_plan(
            req_rows=rows,
            prefix_lens=PREFIX,
            verify_lens=info.verify_lens,
            slots=slots,
            positions=plan.positions,
            mask=info.custom_mask,
        ),
        q=q,
        k_cache=caches[0],
        v_cache=caches[1],
        req_to_token=table,
        scaling=DIM**-0.5,
    )
    got = _attend(q, caches, kv_indices, kv_indptr, qo_indptr, mask)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_draft_extend_arrays_equal_the_cpu_backend(batch) -> None:
    table, rows, caches, generator = batch
    lens = torch.tensor([1, 4, 2, 3, 1], dtype=torch.int32)
    info = TetrisDraftExtendInput(
        num_correct_drafts=lens - 1,
        num_accept_tokens=lens,
        extend_indptr=torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int(),
    )
    kv_indices, kv_indptr, qo_indptr, mask = info.generate_attn_arg_prefill(
        req_pool_indices=rows,
        paged_kernel_lens=PREFIX + lens,
        paged_kernel_lens_sum=None,
        translator=_Translator(table),
        plan=None,
    )
    assert mask is None
    q = torch.randn(int(lens.sum()), HEADS, DIM, generator=generator)
    slots = torch.cat(
        [
            table[row, start : start + count]
            for row, start, count in zip(rows, PREFIX, lens, strict=True)
        ]
    )
    expected = cpu_torch.paged_attention(
        cpu_plan.extend_plan(
            req_rows=rows, prefix_lens=PREFIX, extend_lens=lens, slots=slots
        ),
        q=q,
        k_cache=caches[0],
        v_cache=caches[1],
        req_to_token=table,
        scaling=DIM**-0.5,
    )
    got = _attend(q, caches, kv_indices, kv_indptr, qo_indptr, None)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
