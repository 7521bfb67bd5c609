"""The host versions of SGLang's speculative index functions, against loops."""

import pytest
import torch

from sglang_tetris.adapter.cpu_device import index_ops, sampling_ops, tree_ops
from sglang_tetris.adapter.cpu_device.tree_sampling import tree_speculative_sampling

QLEN_ONLY = 1


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_tree(seed: int, topk: int, steps: int, width: int) -> tuple:
    """Candidates as SGLang's draft lays them out, and the parent node of each."""
    g = generator(seed)
    # Candidate c of step s > 0 has a parent among the topk survivors of step s - 1.
    num_candidates = topk + (steps - 1) * topk * topk
    parent_list = [-1, *range(topk)]
    parent_of: list[int] = [-1] * topk
    for step in range(1, steps):
        base = topk + (step - 1) * topk * topk
        survivors = parent_list[-topk:]
        for survivor in survivors:
            parent_of += [survivor] * topk
        chosen = torch.randperm(topk * topk, generator=g)[:topk].sort().values
        if step < steps - 1:
            parent_list += [base + int(c) for c in chosen]
    selected: list[int] = []
    open_nodes = list(range(topk))
    while len(selected) < width - 1 and open_nodes:
        pick = open_nodes.pop(int(torch.randint(len(open_nodes), (1,), generator=g)))
        selected.append(pick)
        open_nodes += [c for c in range(num_candidates) if parent_of[c] == pick]
    return parent_list, sorted(selected), parent_of


@pytest.mark.parametrize("topk", [1, 2, 4])
def test_build_tree_against_a_loop(topk: int) -> None:
    steps, bs = 4, 6
    width = 1 + steps if topk == 1 else 9
    trees = [random_tree(seed, topk, steps, width) for seed in range(bs)]
    parent_list = torch.tensor([tree[0] for tree in trees])
    selected = torch.tensor([tree[1] for tree in trees])
    seq_lens = torch.arange(bs) * 3 + 5
    mask = torch.zeros(bs * width * width, dtype=torch.bool)
    positions = torch.zeros(bs * width, dtype=torch.int64)
    links = torch.full((3, bs, width), -1)
    tree_ops.build_tree(
        parent_list, selected, seq_lens, mask, positions, *links,
        topk, steps, width, QLEN_ONLY,
    )  # fmt: skip
    for request, (_, chosen, parent_of) in enumerate(trees):
        parents = [
            0 if parent_of[c] == -1 else chosen.index(parent_of[c]) + 1 for c in chosen
        ]
        got = mask.view(bs, width, width)[request]
        for node in range(width):
            path, at = {node, 0}, node
            while at:
                at = parents[at - 1]
                path.add(at)
            assert {i for i in range(width) if got[node, i]} == path
            depth = len(path) - 1
            assert positions.view(bs, width)[request, node] == seq_lens[request] + depth
            children = [i + 1 for i, p in enumerate(parents) if p == node]
            linked, child = [], int(links[1, request, node])
            while child >= 0:
                linked.append(child)
                child = int(links[2, request, child])
            assert linked == children
        assert links[0, request].tolist() == list(
            range(request * width, (request + 1) * width)
        )


def verify_case(seed: int, bs: int = 7, width: int = 8, vocab: int = 5) -> dict:
    """Random trees by links, with few token values so that siblings often match."""
    g = generator(seed)
    next_token = torch.full((bs, width), -1)
    sibling = torch.full((bs, width), -1)
    for request in range(bs):
        last: dict[int, int] = {}
        for node in range(1, width):
            parent = int(torch.randint(node, (1,), generator=g))
            if parent in last:
                sibling[request, last[parent]] = node
            else:
                next_token[request, parent] = node
            last[parent] = node
    return {
        "candidates": torch.randint(vocab, (bs, width), generator=g),
        "index": torch.arange(bs * width).view(bs, width),
        "next_token": next_token,
        "sibling": sibling,
        "target": torch.randint(vocab, (bs, width), generator=g),
    }


def children(case: dict, request: int, node: int) -> list[int]:
    found, child = [], int(case["next_token"][request, node])
    while child >= 0:
        found.append(child)
        child = int(case["sibling"][request, child])
    return found


@pytest.mark.parametrize("seed", range(5))
def test_verify_tree_greedy_against_a_loop(seed: int) -> None:
    case = verify_case(seed)
    bs, width = case["candidates"].shape
    depth = 4
    predicts = torch.zeros(bs * width, dtype=torch.int32)
    accept_index = torch.full((bs, depth), -1, dtype=torch.int32)
    counts = torch.empty(bs, dtype=torch.int32)
    tree_ops.verify_tree_greedy(
        predicts, accept_index, counts, case["candidates"], case["index"],
        case["next_token"], case["sibling"], case["target"],
    )  # fmt: skip
    for request in range(bs):
        path, node = [0], 0
        while len(path) < depth:
            token = case["target"][request, node]
            hits = [
                c
                for c in children(case, request, node)
                if case["candidates"][request, c] == token
            ]
            if not hits:
                break
            node = hits[0]
            path.append(node)
        rows = [request * width + n for n in path]
        assert accept_index[request].tolist() == rows + [-1] * (depth - len(rows))
        assert counts[request] == len(path) - 1
        for n in path:
            assert predicts[request * width + n] == case["target"][request, n]


def test_sampled_verify_follows_the_target_law() -> None:
    """20,000 draws of the first two tokens; chi-square, false alarm 1 in 10,000."""
    vocab, width, n = 4, 4, 20_000
    g = generator(11)
    target = torch.softmax(torch.randn(width, vocab, generator=g), dim=-1)
    # Anchor with children 1 (token 2) and 2 (token 0); node 3 (token 1) under node 1.
    case = {
        "candidates": torch.tensor([[0, 2, 0, 1]]).repeat(n, 1),
        "next_token": torch.tensor([[1, 3, -1, -1]]).repeat(n, 1),
        "sibling": torch.tensor([[-1, 2, -1, -1]]).repeat(n, 1),
    }
    predicts = torch.zeros(n * width, dtype=torch.int32)
    accept_index = torch.full((n, 3), -1, dtype=torch.int32)
    counts = torch.empty(n, dtype=torch.int32)
    tree_speculative_sampling(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=counts,
        candidates=case["candidates"],
        retrive_index=torch.arange(n * width).view(n, width),
        retrive_next_token=case["next_token"],
        retrive_next_sibling=case["sibling"],
        uniform_samples=torch.rand(n, width, generator=g),
        uniform_samples_for_final_sampling=torch.rand(n, generator=g),
        target_probs=target.repeat(n, 1, 1),
        draft_probs=torch.zeros(n, width, vocab),
    )
    tokens = predicts.view(n, width)
    first = tokens[:, 0].long()
    observed = torch.bincount(first, minlength=vocab).double()
    expected = target[0].double() * n
    # 3 degrees of freedom: P(chi-square > 21.1) is 1e-4.
    assert ((observed - expected) ** 2 / expected).sum() < 21.1
    # Behind node 1 the second token follows row 1, and is accepted where it is token 1.
    behind = (first == 2) & (counts >= 1)
    second = torch.bincount(tokens[behind, 1].long(), minlength=vocab).double()
    expected = target[1].double() * int(behind.sum())
    assert ((second - expected) ** 2 / expected).sum() < 21.1
    assert bool((counts[first == 2] >= 1).all())
    assert bool((counts[first == 1] == 0).all())


def test_slots_and_tokens_against_loops() -> None:
    g = generator(3)
    table = torch.randperm(5 * 40, generator=g).view(5, 40).int()
    rows = torch.tensor([3, 0, 4])
    starts, ends = torch.tensor([7, 0, 20]), torch.tensor([9, 5, 20])
    expected = [
        int(table[r, c])
        for r, s, e in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
        for c in range(s, e)
    ]
    got = index_ops.assign_extend_cache_locs(
        req_pool_indices=rows,
        req_to_token=table,
        start_offset=starts,
        end_offset=ends,
        batch_size=3,
        draft_token_num=0,
        device="cpu",
    )
    assert got.tolist() == expected
    out = torch.zeros(3 * 4, dtype=torch.int64)
    index_ops.assign_draft_cache_locs_contiguous(rows, table, starts, out, 2, 2)
    assert out.view(3, 4)[0].tolist() == table[3, 7:11].tolist()
    written = table.clone()
    new = torch.arange(1000, 1000 + len(expected))
    index_ops.assign_req_to_token_pool(rows, written, starts, ends, new, 3)
    assert written[3, 7:9].tolist() == [1000, 1001]
    assert written[0, :5].tolist() == [1002, 1003, 1004, 1005, 1006]
    assert (written != table).sum() == len(expected)
    last = index_ops.last_loc(table, rows, starts)
    assert last.tolist() == [int(table[3, 6]), -1, int(table[4, 19])]


def test_accepted_slots() -> None:
    window = torch.arange(100, 112)
    num_front = torch.tensor([2, 1, 3])
    front = torch.zeros(12, dtype=torch.int64)
    index_ops.fill_front_out_cache_loc(num_front, window, front)
    assert front[:6].tolist() == [100, 101, 104, 108, 109, 110]
    accept = torch.tensor([[0, 2, -1], [5, -1, -1], [8, 9, 11]], dtype=torch.int32)
    slots = torch.zeros(9, dtype=torch.int64)
    index_ops.fill_accept_out_cache_loc(accept, window, slots, 9)
    assert slots[:6].tolist() == [100, 102, 105, 108, 109, 111]
    tokens = torch.arange(9)
    bonus = torch.zeros(3, dtype=torch.int32)
    index_ops.fill_bonus_tokens(tokens, num_front, bonus, 3, 3)
    assert bonus.tolist() == [1, 3, 8]


def murmur(seed: int, position: int, column: int) -> int:
    """MurmurHash3 x86 32 of the 16 bytes, seed 0."""
    mask = 0xFFFFFFFF
    state = 0
    for block in (seed & mask, (seed >> 32) & mask, position & mask, column & mask):
        block = block * 0xCC9E2D51 & mask
        block = (block << 15 | block >> 17) & mask
        state ^= block * 0x1B873593 & mask
        state = (state << 13 | state >> 19) & mask
        state = (state * 5 + 0xE6546B64) & mask
    state ^= 16
    state = (state ^ state >> 16) * 0x85EBCA6B & mask
    state = (state ^ state >> 13) * 0xC2B2AE35 & mask
    return state ^ state >> 16


def test_murmur_hash_is_sglangs() -> None:
    seeds = torch.tensor([0, 1, 42, 2**40 + 7, 2**63 - 1])
    positions = torch.tensor([0, 3, 99, 4096, 7])
    columns = torch.tensor([0, 1, 17, 49151])
    expected = [
        [murmur(s, p, c) for c in columns.tolist()]
        for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    got = sampling_ops.murmur_hash32(seeds.to(torch.uint64), positions, columns)
    assert got.dtype == torch.uint32
    assert got.tolist() == expected
    assert sampling_ops.torch_murmur_hash32(seeds, positions, columns).tolist() == (
        expected
    )


def test_renormalised_probabilities() -> None:
    probs = torch.tensor([[0.5, 0.1, 0.3, 0.1], [0.25, 0.25, 0.25, 0.25]])
    kept = sampling_ops.top_k_renorm(probs, torch.tensor([2, 1 << 30]))
    torch.testing.assert_close(kept[0], torch.tensor([0.625, 0.0, 0.375, 0.0]))
    torch.testing.assert_close(kept[1], probs[1])
    kept = sampling_ops.top_p_renorm(probs, torch.tensor([0.6, 1.0]))
    torch.testing.assert_close(kept[0], torch.tensor([0.625, 0.0, 0.375, 0.0]))
    torch.testing.assert_close(kept[1], probs[1])
