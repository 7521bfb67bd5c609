"""The CPU attention op: the compiled kernel and plain torch against a loop.

Each case builds one plan (decode, extend with a cached prefix, ragged tree verify,
multi-step draft decode) over a pool with shuffled slots, and asks every
implementation for the same rows.
"""

import math
from collections.abc import Callable

import pytest
import torch

from sglang_tetris.adapter.attention import cpu_native, cpu_plan, cpu_torch
from sglang_tetris.adapter.attention.cpu_plan import AttentionPlan

NUM_SLOTS = 4096
MAX_LEN = 700
# float32 sums of a few hundred terms, against the same in float64.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}

pytestmark = pytest.mark.skipif(
    not cpu_native.is_available(), reason="needs a C compiler"
)


def reference(
    plan: AttentionPlan,
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    scaling: float,
    window: int = -1,
    slot_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """One row, one head, one key at a time, in float64."""
    out = torch.zeros(q.shape[0], q.shape[1], v_cache.shape[2], dtype=torch.float64)
    keys, values = k_cache.double(), v_cache.double()
    for group in range(plan.num_groups):
        first, last = plan.row_indptr[group : group + 2].tolist()
        for row in range(first, last):
            slots = _seen_slots(plan, group, row, first, last, req_to_token, window)
            if slot_map is not None:
                slots = slot_map[slots].tolist()
            for head in range(q.shape[1]):
                kv_head = head * k_cache.shape[1] // q.shape[1]
                scores = keys[slots, kv_head] @ q[row, head].double() * scaling
                out[row, head] = torch.softmax(scores, 0) @ values[slots, kv_head]
    return out


def _seen_slots(
    plan: AttentionPlan,
    group: int,
    row: int,
    first: int,
    last: int,
    req_to_token: torch.Tensor,
    window: int,
) -> list[int]:
    low = int(plan.row_positions[row]) - window if window >= 0 else 0
    start = 0 if plan.prefix_starts is None else int(plan.prefix_starts[group])
    prefix = req_to_token[plan.req_rows[group]].tolist()[: int(plan.prefix_lens[group])]
    seen = [slot for p, slot in enumerate(prefix) if p >= max(low, start)]
    tail = slice(*plan.tail_indptr[group : group + 2].tolist())
    slots, positions = plan.tail_slots[tail].tolist(), plan.tail_positions[tail]
    num_tail = len(slots)
    if plan.mask is None:
        visible = [t <= num_tail - (last - row) for t in range(num_tail)]
    else:
        at = int(plan.mask_indptr[group]) + (row - first) * num_tail
        visible = plan.mask[at : at + num_tail].tolist()
    for slot, position, sees in zip(slots, positions.tolist(), visible, strict=True):
        if sees and position >= low:
            seen.append(slot)
    return seen


class World:
    """A pool, a table with shuffled slots, and query rows."""

    def __init__(
        self,
        *,
        num_requests: int,
        heads: tuple[int, int] = (6, 2),
        dims: tuple[int, int] = (64, 64),
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.num_q_heads, num_kv_heads = heads
        self.dim, v_dim = dims
        self.k_cache = self.normal(NUM_SLOTS, num_kv_heads, self.dim)
        self.v_cache = self.normal(NUM_SLOTS, num_kv_heads, v_dim)
        slots = torch.randperm(NUM_SLOTS, generator=self.generator)
        self.table = slots[: num_requests * MAX_LEN].view(num_requests, MAX_LEN).int()
        self.req_rows = torch.randperm(num_requests, generator=self.generator)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def integers(self, low: int, high: int, n: int) -> torch.Tensor:
        return torch.randint(low, high, (n,), generator=self.generator)

    def slots(self, starts: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        """The table's slots at positions ``starts[r] .. starts[r] + lens[r] - 1``."""
        pieces = [
            self.table[row, start : start + n]
            for row, start, n in zip(
                self.req_rows.tolist(), starts.tolist(), lens.tolist(), strict=True
            )
        ]
        return torch.cat(pieces).long()

    def call(self, function: Callable[..., torch.Tensor], plan, q, **options):
        return function(
            plan,
            q=q,
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            req_to_token=self.table,
            scaling=self.dim**-0.5,
            **options,
        )


def native(plan: AttentionPlan, *, q, k_cache, **options) -> torch.Tensor:
    share = q.shape[1] // k_cache.shape[1]
    return cpu_native.NativePlan(plan, share=share).attend(
        q=q, k_cache=k_cache, **options
    )


def random_tree_mask(world: World, lens: torch.Tensor) -> tuple:
    """Flat QLEN_ONLY mask of random trees, and each row's depth."""
    masks, depths = [], []
    for n in lens.tolist():
        mask = torch.eye(n, dtype=torch.bool)
        depth = [0] * n
        for node in range(1, n):
            parent = int(world.integers(0, node, 1))
            mask[node] |= mask[parent]
            depth[node] = depth[parent] + 1
        masks.append(mask.reshape(-1))
        depths.append(torch.tensor(depth))
    return torch.cat(masks), torch.cat(depths)


def make_plan(kind: str, world: World, num_requests: int) -> AttentionPlan:
    prefix = world.integers(1, 150, num_requests)
    rows = world.req_rows
    if kind == "decode":
        lens = torch.ones_like(prefix)
        return cpu_plan.decode_plan(
            req_rows=rows, seq_lens=prefix + 1, slots=world.slots(prefix, lens)
        )
    if kind == "extend":
        prefix[0] = 0
        lens = world.integers(1, 90, num_requests)
        return cpu_plan.extend_plan(
            req_rows=rows,
            prefix_lens=prefix,
            extend_lens=lens.int(),
            slots=world.slots(prefix, lens),
        )
    if kind in ("verify", "verify_chain"):
        lens = world.integers(1, 12, num_requests)
        mask, depth = random_tree_mask(world, lens)
        positions = prefix.repeat_interleave(lens) + depth
        if kind == "verify_chain":
            mask = None
            positions = torch.cat([torch.arange(n) for n in lens.tolist()])
            positions += prefix.repeat_interleave(lens)
        return cpu_plan.verify_plan(
            req_rows=rows,
            prefix_lens=prefix,
            verify_lens=lens.int(),
            slots=world.slots(prefix, lens),
            positions=positions,
            mask=mask,
        )
    topk, num_steps, step = (1, 4, 2) if kind == "draft_chain" else (3, 4, 2)
    lens = torch.full_like(prefix, topk * num_steps)
    starts = (prefix // 2).clamp(max=20) if kind == "draft_gap" else None
    return cpu_plan.draft_decode_plan(
        req_rows=rows,
        prefix_lens=prefix,
        branch_slots=world.slots(prefix, lens).view(-1, topk, num_steps),
        step=step,
        prefix_starts=starts,
    )


KINDS = (
    "decode",
    "extend",
    "verify",
    "verify_chain",
    "draft_chain",
    "draft_tree",
    "draft_gap",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [-1, 0, 7, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_every_forward_mode(kind: str, window: int, dtype: torch.dtype) -> None:
    world = World(num_requests=5, dtype=dtype, seed=hash_of(kind, window))
    plan = make_plan(kind, world, 5)
    q = world.normal(plan.num_rows, world.num_q_heads, world.dim)
    expected = world.call(reference, plan, q, window=window)
    for function in (native, cpu_torch.paged_attention):
        got = world.call(function, plan, q, window=window)
        assert got.dtype == dtype
        error = (got.double() - expected).abs().max().item()
        assert error < TOLERANCE[dtype], (function, error)


@pytest.mark.parametrize(
    ("heads", "dims"),
    [
        ((4, 4), (16, 16)),
        ((9, 3), (64, 64)),
        ((8, 1), (128, 128)),
        ((32, 1), (80, 40)),
        ((2, 2), (256, 256)),
        ((6, 2), (8, 72)),
    ],
)
def test_head_layouts(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    world = World(num_requests=3, heads=heads, dims=dims)
    for kind in ("decode", "extend", "verify"):
        plan = make_plan(kind, world, 3)
        q = world.normal(plan.num_rows, world.num_q_heads, world.dim)
        expected = world.call(reference, plan, q)
        for function in (native, cpu_torch.paged_attention):
            got = world.call(function, plan, q).double()
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=0.0)


def test_slot_map_of_a_window_pool() -> None:
    world = World(num_requests=3)
    slot_map = torch.randperm(NUM_SLOTS, generator=world.generator)
    plan = make_plan("verify", world, 3)
    q = world.normal(plan.num_rows, world.num_q_heads, world.dim)
    expected = world.call(reference, plan, q, slot_map=slot_map, window=20)
    for function in (native, cpu_torch.paged_attention):
        got = world.call(function, plan, q, slot_map=slot_map, window=20).double()
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_store_equals_index_assignment(dtype: torch.dtype) -> None:
    world = World(num_requests=4, dtype=dtype)
    plan = make_plan("extend", world, 4)
    # Strided, as slices of a fused projection are.
    qkv = world.normal(plan.num_rows, 10, world.dim)
    q, k, v = qkv[:, :6], qkv[:, 6:8], qkv[:, 8:]
    slot_map = torch.randperm(NUM_SLOTS, generator=world.generator)
    for mapping in (None, slot_map):
        slots = plan.tail_slots if mapping is None else mapping[plan.tail_slots]
        k_cache, v_cache = world.k_cache.clone(), world.v_cache.clone()
        cpu_torch.store_kv(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slots=slots)
        out = world.call(
            native, plan, q, slot_map=mapping, new_kv=(k, v, plan.tail_slots)
        )
        assert torch.equal(world.k_cache, k_cache)
        assert torch.equal(world.v_cache, v_cache)
        again = world.call(native, plan, q, slot_map=mapping)
        assert torch.equal(out, again)


def test_a_row_has_the_same_bits_in_every_mode_and_batch() -> None:
    """Decode one by one, a chain verify and an extend agree bit for bit."""
    world = World(num_requests=3)
    prefix = torch.tensor([70, 31, 128])
    lens = torch.tensor([9, 5, 40])
    slots = world.slots(prefix, lens)
    extend = cpu_plan.extend_plan(
        req_rows=world.req_rows, prefix_lens=prefix, extend_lens=lens, slots=slots
    )
    q = world.normal(extend.num_rows, world.num_q_heads, world.dim)
    together = world.call(native, extend, q)
    verify = cpu_plan.verify_plan(
        req_rows=world.req_rows,
        prefix_lens=prefix,
        verify_lens=lens,
        slots=slots,
        positions=extend.row_positions,
        mask=torch.cat([torch.ones(n, n).tril().bool().view(-1) for n in lens]),
    )
    assert torch.equal(world.call(native, verify, q), together)
    for request in range(3):
        first = int(extend.row_indptr[request])
        for i in range(int(lens[request])):
            plan = cpu_plan.decode_plan(
                req_rows=world.req_rows[request : request + 1],
                seq_lens=prefix[request : request + 1] + i + 1,
                slots=slots[first + i : first + i + 1],
            )
            alone = world.call(native, plan, q[first + i : first + i + 1])
            assert torch.equal(alone[0], together[first + i])


def test_move_slots_reads_before_it_writes() -> None:
    world = World(num_requests=1)
    source = torch.tensor([5, 6, 7, 100])
    target = torch.tensor([4, 5, 6, 7])
    expected = [cache.clone() for cache in (world.k_cache, world.v_cache)]
    for cache in expected:
        cache[target] = cache[source]
    cpu_native.move_slots([world.k_cache, world.v_cache], target, source)
    assert torch.equal(world.k_cache, expected[0])
    assert torch.equal(world.v_cache, expected[1])


def test_empty_batches() -> None:
    world = World(num_requests=1)
    none = torch.zeros(0, dtype=torch.int64)
    plan = cpu_plan.decode_plan(req_rows=none, seq_lens=none, slots=none)
    q = world.normal(0, world.num_q_heads, world.dim)
    for function in (native, cpu_torch.paged_attention):
        assert world.call(function, plan, q).shape == (0, 6, 64)


def test_a_short_mask_is_refused() -> None:
    world = World(num_requests=1)
    lens = torch.tensor([3])
    with pytest.raises(ValueError, match="custom_mask has 8 elements"):
        cpu_plan.verify_plan(
            req_rows=world.req_rows,
            prefix_lens=torch.tensor([4]),
            verify_lens=lens,
            slots=world.slots(torch.tensor([4]), lens),
            positions=torch.arange(3),
            mask=torch.ones(8, dtype=torch.bool),
        )


def test_what_the_kernel_leaves_to_torch() -> None:
    sizes = {"num_q_heads": 4, "num_kv_heads": 2, "dim": 64, "v_dim": 64}
    types = {"row_dtype": torch.float32, "cache_dtype": torch.float32}
    assert cpu_native.supports(**sizes, **types)
    assert not cpu_native.supports(**sizes, **types, logit_cap=30.0)
    assert not cpu_native.supports(**sizes | {"dim": 12}, **types)
    assert not cpu_native.supports(**sizes | {"dim": 512}, **types)
    assert not cpu_native.supports(**sizes | {"num_q_heads": 80}, **types)
    half = types | {"cache_dtype": torch.float16}
    assert not cpu_native.supports(**sizes, **half)


def hash_of(*values: object) -> int:
    """A seed that does not change between runs, as ``hash`` of a string would."""
    return sum(ord(c) * (i + 1) for i, c in enumerate(repr(values)))


def test_exp_and_sums_stay_accurate_for_large_scores() -> None:
    """Scores of several hundred: the running maximum keeps the sums finite."""
    world = World(num_requests=1)
    world.k_cache *= 20.0
    plan = make_plan("decode", world, 1)
    q = world.normal(1, world.num_q_heads, world.dim) * 20.0
    expected = world.call(reference, plan, q)
    got = world.call(native, plan, q)
    assert math.isfinite(got.sum().item())
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=0.0)
