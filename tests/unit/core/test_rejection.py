"""verify_chains: the two rules at any depth, and everything around them.

That the rules give the target's law is shown in test_exactness_enumeration.
"""

import dataclasses

import numpy as np
import pytest
import torch

from sglang_tetris.core import (
    DraftTrees,
    build_verify_plan,
    match_tree,
    select_draft_tokens,
    verify_chains,
)
from tests.reference import rejection
from tests.reference.emitted import forest_of, plan_of
from tests.reference.forests import trees_of

BELOW_ONE = 1 - 2.0**-53


def law(rng: np.random.Generator, *shape: int, zeros: float = 0.0) -> np.ndarray:
    """Random laws; `zeros` is the chance of a token to have none."""
    weights = rng.random(shape) ** 3 * (rng.random(shape) >= zeros)
    weights[..., 0] += 1e-3
    return weights / weights.sum(-1, keepdims=True)


class Batch:
    """Chains of `depth` drafts over `vocab` tokens, `ids` the ones the draft knows."""

    def __init__(
        self, seed: int, bs: int, depth: int, vocab: int, *, zeros=0.0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.ids = rng.permutation(vocab)[: max(vocab // 2, 2)]
        self.hot = law(rng, bs, depth, len(self.ids), zeros=zeros)
        self.q = np.zeros((bs, depth, vocab))
        self.q[..., self.ids] = self.hot
        drawn = self.hot.cumsum(-1) > rng.random((bs, depth, 1))
        self.drafts = self.ids[drawn.argmax(-1)]
        self.counts = rng.integers(0, depth + 1, bs)
        if bs:
            self.counts[0] = depth
        # Near the draft's law, so that drafts are accepted about as often as not.
        near = np.concatenate([self.q, law(rng, bs, 1, vocab)], 1)
        self.p = (near + law(rng, bs, depth + 1, vocab, zeros=zeros)) / 2
        self.coins = rng.random((bs, depth))
        self.final = rng.random(bs)

    @property
    def keep(self) -> np.ndarray:
        return np.arange(self.drafts.shape[1]) < self.counts[:, None]

    def plan(self):
        bs, depth = self.drafts.shape
        trees = forest_of(self.drafts, np.ones((bs, depth)), range(-1, depth - 1))
        return plan_of(trees, self.keep)

    def verify(self, *, block, dtype=torch.float64, hot=False, plan=None):
        plan = self.plan() if plan is None else plan
        used = np.arange(self.p.shape[1]) <= self.counts[:, None]
        rows = np.ones((plan.input_ids.shape[0], self.p.shape[2]))
        rows[: used.sum()] = self.p[used]
        result = verify_chains(
            plan,
            target_probs=torch.from_numpy(rows).to(dtype),
            draft_probs=torch.from_numpy(self.hot if hot else self.q).to(dtype),
            uniforms=torch.from_numpy(self.coins),
            uniforms_final=torch.from_numpy(self.final),
            draft_token_ids=torch.from_numpy(self.ids) if hot else None,
            block=block,
        )
        result.validate()
        assert result.accept_index.shape == (plan.batch_size, plan.max_depth + 1)
        return result

    def expected(self, rule: str) -> list[list[int]]:
        """The emitted tokens by the plain reference."""
        emitted = []
        for row, n in enumerate(self.counts):
            drafts = self.drafts[row, :n].tolist()
            p, q = self.p[row].tolist(), self.q[row].tolist()
            chances = rejection.coin_chances(rule, p, q, drafts)
            falls = [u < h for u, h in zip(self.coins[row], chances, strict=False)]
            correct = rejection.num_correct(rule, falls)
            final = np.cumsum(rejection.final_law(rule, p, q, drafts, correct))
            token = int(np.searchsorted(final, self.final[row], side="right"))
            emitted.append([*drafts[:correct], token])
        return emitted


def tokens_of(result) -> list[list[int]]:
    return [[t for t in row if t != -1] for row in result.accept_tokens.tolist()]


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("seed", range(12))
def test_equals_the_reference(rule, seed):
    """Up to six drafts; 700 tokens are more than are added up at once."""
    vocab = (5, 700)[seed % 2]
    batch = Batch(seed, 24, 1 + seed % 6, vocab, zeros=(0.0, 0.5)[seed % 3 == 2])
    result = batch.verify(block=rule == "block")
    assert tokens_of(result) == batch.expected(rule)
    begin = np.cumsum([0, *(batch.counts[:-1] + 1)])
    for row, index in enumerate(result.accept_index.tolist()):
        length = int(result.accept_lens[row])
        assert index[:length] == [begin[row] + place for place in range(length)]


@pytest.mark.parametrize("block", [False, True])
def test_a_draft_vocabulary_is_the_same_as_zeros_elsewhere(block):
    batch = Batch(3, 64, 4, 300)
    for dtype in (torch.float32, torch.float64):
        whole = batch.verify(block=block, dtype=dtype)
        hot = batch.verify(block=block, dtype=dtype, hot=True)
        assert hot.accept_tokens.equal(whole.accept_tokens)
        assert hot.accept_lens.equal(whole.accept_lens)
    # Tokens that the draft does not know are emitted, too.
    final = [row[-1] for row in tokens_of(whole)]
    assert set(final) - set(batch.ids.tolist())


@pytest.mark.parametrize("block", [False, True])
def test_float32_differs_only_where_a_coin_is_on_the_edge(block):
    batch = Batch(4, 500, 3, 50)
    single = batch.verify(block=block, dtype=torch.float32).accept_tokens
    double = batch.verify(block=block).accept_tokens
    # A coin decides otherwise with probability 1e-6 or so: 1 in 500 is far away.
    assert (single != double).any(1).sum() <= 1


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("greedy_draft", [False, True])
def test_a_greedy_request_is_matched(block, greedy_draft):
    batch = Batch(5, 200, 4, 9)
    best = batch.p.argmax(-1)
    # Half of the drafts are the target's choice.
    agree = np.random.default_rng(6).random(batch.drafts.shape) < 0.5
    best[:, :4] = np.where(agree, batch.drafts, best[:, :4])
    batch.p = np.eye(9)[best]
    if greedy_draft:
        batch.q = np.eye(9)[batch.drafts]
    plan = batch.plan()
    used = np.arange(5) <= batch.counts[:, None]
    want = match_tree(plan, torch.from_numpy(best[used]))
    assert len(want.accept_lens.unique()) == 5
    for coin in (0.0, 0.5, BELOW_ONE):
        batch.coins[:], batch.final[:] = coin, coin
        for dtype in (torch.float32, torch.float64):
            got = batch.verify(block=block, dtype=dtype, plan=plan)
            assert got.accept_tokens.equal(want.accept_tokens)
            assert got.accept_index.equal(want.accept_index)
            assert got.accept_lens.equal(want.accept_lens)


def test_a_greedy_draft_is_matched_where_its_law_rounds_to_one():
    """The residual after it is empty in float32, yet the draft after it was drawn."""
    plan = plan_of(
        forest_of(np.array([[1, 2]]), np.ones((1, 2))), np.ones((1, 2), bool)
    )
    q = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 1.0, 1e-9]]])
    result = verify_chains(
        plan,
        target_probs=torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]),
        draft_probs=q,
        uniforms=torch.full((1, 2), 0.3, dtype=torch.float64),
        uniforms_final=torch.full((1,), 0.3, dtype=torch.float64),
        block=True,
    )
    assert tokens_of(result) == [[1, 1]]


@pytest.mark.parametrize("block", [False, True])
def test_equal_laws_accept_everything(block):
    batch = Batch(7, 60, 4, 40)
    batch.p[:, :4] = batch.q
    batch.coins[:] = BELOW_ONE
    for dtype in (torch.float32, torch.float64):
        result = batch.verify(block=block, dtype=dtype)
        assert result.num_correct_drafts.tolist() == batch.counts.tolist()


@pytest.mark.parametrize("block", [False, True])
def test_an_empty_residual_falls_back_to_the_targets_law(block):
    """Laws that differ by rounding only: q is the larger everywhere, by one bit."""
    p = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float32)
    q = p * (1 + 2.0**-23)
    plan = plan_of(
        forest_of(np.array([[1, 1]]), np.ones((1, 2))), np.array([[True, False]])
    )
    result = verify_chains(
        plan,
        target_probs=p.repeat(2, 1),
        draft_probs=q.repeat(1, 2, 1),
        uniforms=torch.full((1, 2), BELOW_ONE, dtype=torch.float64),
        uniforms_final=torch.tensor([0.8], dtype=torch.float64),
        block=block,
    )
    assert result.num_correct_drafts.tolist() == [0]
    assert tokens_of(result) == [[2]]


@pytest.mark.parametrize("vocab", [3, 256, 257, 1000])
def test_a_token_of_probability_0_is_never_drawn(vocab):
    rng = np.random.default_rng(vocab)
    batch = Batch(8, 400, 1, vocab)
    batch.counts[:] = 0
    weights = rng.random((400, 2, vocab)) * (rng.random((400, 2, vocab)) < 0.1)
    weights[:, :, vocab // 2] += 1e-6
    batch.p = weights / weights.sum(-1, keepdims=True)
    batch.final[:100], batch.final[100:200] = 0.0, BELOW_ONE
    for dtype in (torch.float32, torch.float64):
        token = batch.verify(block=False, dtype=dtype).accept_tokens[:, 0].numpy()
        support = batch.p[:, 0] > 0
        assert support[np.arange(400), token].all()
        assert (token[:100] == support[:100].argmax(1)).all()
        last = vocab - 1 - support[100:200, ::-1].argmax(1)
        assert (token[100:200] == last).all()


def test_a_coin_on_the_edge_of_a_chunk_draws_no_token_of_probability_0():
    """Rounding puts some of these coins a little before the 256 tokens they choose."""
    batch = Batch(12, 400, 1, 3 * 256)
    batch.counts[:] = 0
    batch.p[:, :, 256:300] = 0
    batch.p /= batch.p.sum(-1, keepdims=True)
    ends = torch.from_numpy(batch.p[:, 0]).view(400, 3, 256).sum(2).cumsum(1).numpy()
    batch.final = ends[:, 0] / ends[:, 2]
    token = batch.verify(block=False).accept_tokens[:, 0].numpy()
    assert set(token.tolist()) <= {255, 300}


def test_every_token_of_a_wide_flat_law_has_its_share():
    """Sums in float32 would be some hundredths of a token off, float32 coins a few."""
    # No power of two: its share would be exact in float32, too.
    vocab, bs = 3 * 2**16, 64
    none = np.zeros((bs, 0))
    plan = plan_of(forest_of(none, none, ()), none.astype(bool))
    want = torch.arange(bs) * 3001 + 17
    for inside in (0.001, 0.999):
        result = verify_chains(
            plan,
            target_probs=torch.full((1, vocab), 1 / vocab).expand(bs, vocab),
            draft_probs=torch.zeros(bs, 0, vocab),
            uniforms=torch.zeros(bs, 0, dtype=torch.float64),
            uniforms_final=(want.to(torch.float64) + inside) / vocab,
        )
        assert result.accept_tokens[:, 0].equal(want)


@pytest.mark.parametrize("block", [False, True])
def test_the_order_of_the_requests_does_not_matter(block):
    batch = Batch(9, 30, 3, 20)
    want = tokens_of(batch.verify(block=block))
    order = np.random.default_rng(0).permutation(30)
    for name in ("hot", "q", "p", "drafts", "counts", "coins", "final"):
        setattr(batch, name, getattr(batch, name)[order])
    assert tokens_of(batch.verify(block=block)) == [want[row] for row in order]


@pytest.mark.parametrize("block", [False, True])
def test_a_padded_plan_gives_the_same(block):
    batch = Batch(10, 12, 4, 20)
    trees = forest_of(batch.drafts, np.ones((12, 4)), range(-1, 3))
    exact = batch.plan()
    allocation = select_draft_tokens(
        trees, draft_budget=48, max_drafts=torch.from_numpy(batch.counts)
    )
    zeros = torch.zeros(12, dtype=torch.int64)
    padded = build_verify_plan(
        trees,
        allocation,
        anchors=zeros,
        prefix_lens=zeros,
        total_verify_tokens=exact.input_ids.shape[0] + 5,
        num_mask_elements=400,
    )
    want = batch.verify(block=block, plan=exact)
    got = batch.verify(block=block, plan=padded)
    assert got.accept_tokens.equal(want.accept_tokens)
    assert got.accept_index.equal(want.accept_index)


@pytest.mark.parametrize("block", [False, True])
def test_rows_that_a_bound_has_cut_off_are_not_read(block):
    """An accelerator builds such a plan when its bound is too low."""
    batch = Batch(13, 6, 3, 20)
    batch.counts[:] = 3
    whole, plan = batch.verify(block=block), batch.plan()
    rows = {name: getattr(plan, name)[:18] for name in ("positions", "node_ids")}
    cut = dataclasses.replace(plan, input_ids=plan.input_ids[:18], **rows)
    result = verify_chains(
        cut,
        target_probs=torch.from_numpy(batch.p.reshape(24, 20)[:18]),
        draft_probs=torch.from_numpy(batch.q),
        uniforms=torch.from_numpy(batch.coins),
        uniforms_final=torch.from_numpy(batch.final),
        block=block,
    )
    assert result.accept_tokens[:4].equal(whole.accept_tokens[:4])
    # The last two anchors are rows 16 and 20.
    assert result.accept_lens[4] in (1, 2)
    assert result.accept_lens[5] == 0


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize(("bs", "depth"), [(0, 0), (0, 3), (4, 0)])
def test_empty(bs, depth, block):
    batch = Batch(11, bs, depth, 6)
    result = batch.verify(block=block)
    assert result.accept_lens.tolist() == [1] * bs
    want = (batch.p[:, 0].cumsum(1) > batch.final[:, None]).argmax(1)
    assert result.accept_tokens[:, 0].tolist() == want.tolist()


def two_chains(**changes):
    """Arguments of a call that is right, but for `changes`."""
    trees = trees_of([(1, -1, 0.9), (2, 0, 0.9)], [(0, -1, 0.9), (1, 0, 0.1)])
    zeros = torch.zeros(2, dtype=torch.int64)
    plan = build_verify_plan(
        trees,
        select_draft_tokens(trees, draft_budget=3),
        anchors=zeros,
        prefix_lens=zeros,
    )
    arguments = {
        "target_probs": torch.full((5, 4), 0.25),
        "draft_probs": torch.full((2, 2, 4), 0.25),
        "uniforms": torch.zeros(2, 2, dtype=torch.float64),
        "uniforms_final": torch.zeros(2, dtype=torch.float64),
    }
    return plan, arguments | changes


def with_value(name: str, place: tuple[int, ...], value: float) -> dict:
    changed = two_chains()[1][name].clone()
    changed[place] = value
    return {name: changed}


IDS = torch.tensor([0, 1, 2, 3])


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"target_probs": torch.ones(4, 4)}, "target_probs", "[4, 4]"),
        ({"target_probs": torch.ones(5, 4).half()}, "target_probs", "float16"),
        ({"draft_probs": torch.ones(2, 2, 3)}, "draft_probs", "[2, 2, 3]"),
        ({"draft_probs": torch.ones(2, 1, 4)}, "draft_probs", "[2, 1, 4]"),
        ({"draft_probs": torch.ones(2, 2, 4).double()}, "draft_probs", "float64"),
        ({"draft_token_ids": IDS[:3]}, "draft_probs", "[2, 2, 4]"),
        ({"draft_token_ids": IDS.int()}, "draft_token_ids", "int32"),
        ({"draft_token_ids": IDS + 1}, "draft_token_ids", "4 at [3]"),
        ({"draft_token_ids": IDS.clamp(max=2)}, "draft_token_ids", "2 at [2]"),
        ({"uniforms": torch.zeros(2, 2)}, "uniforms", "float32"),
        ({"uniforms": torch.zeros(2, 3).double()}, "uniforms", "[2, 3]"),
        ({"uniforms_final": torch.zeros(1).double()}, "uniforms_final", "[1]"),
        (with_value("uniforms", (0, 1), 1.0), "uniforms", "1.0 at [0, 1]"),
        (with_value("uniforms_final", (1,), -0.5), "uniforms_final", "-0.5 at [1]"),
        (with_value("target_probs", (4, 0), 0.5), "target_probs", "1.25 at [4]"),
        (with_value("target_probs", (2, 0), torch.nan), "target_probs", "nan at [2]"),
        (with_value("draft_probs", (1, 0, 2), 0.0), "draft_probs", "0.75 at [1, 0]"),
    ],
)
def test_bad_arguments(changes, name, value):
    plan, arguments = two_chains(**changes)
    with pytest.raises(ValueError, match=f"^{name} must ") as error:
        verify_chains(plan, **arguments)
    assert value in str(error.value)


def test_a_draft_that_cannot_have_been_drawn_is_refused():
    laws = torch.tensor([[0.5, 0.0, 0.25, 0.25], [0.25] * 4]).repeat(2, 1, 1)
    plan, arguments = two_chains(draft_probs=laws)
    message = r"^draft_probs must be positive at the token drawn, got 0\.0 at \[0, 0\]"
    with pytest.raises(ValueError, match=message):
        verify_chains(plan, **arguments)
    # The same where the draft's vocabulary does not hold the token.
    arguments["draft_probs"] = torch.full((2, 2, 2), 0.5)
    with pytest.raises(ValueError, match=message):
        verify_chains(plan, **arguments, draft_token_ids=torch.tensor([0, 2]))


def test_laws_and_coins_of_drafts_that_are_not_verified_are_ignored():
    plan, arguments = two_chains()
    want = verify_chains(plan, **arguments)
    arguments["draft_probs"][1, 1] = torch.nan
    arguments["uniforms"][1, 1] = 7.0
    assert plan.verify_lens.tolist() == [3, 2]
    for block in (False, True):
        got = verify_chains(plan, **arguments, block=block)
        assert got.accept_tokens.equal(want.accept_tokens)


def test_trees_are_refused():
    trees: DraftTrees = trees_of([(1, -1, 0.9), (2, -1, 0.9)])
    zeros = torch.zeros(1, dtype=torch.int64)
    plan = build_verify_plan(
        trees,
        select_draft_tokens(trees, draft_budget=2),
        anchors=zeros,
        prefix_lens=zeros,
    )
    with pytest.raises(ValueError, match=r"^plan.retrieve_parent must .* got 0 at \[0"):
        verify_chains(
            plan,
            target_probs=torch.full((3, 4), 0.25),
            draft_probs=torch.full((1, 2, 4), 0.25),
            uniforms=torch.zeros(1, 2, dtype=torch.float64),
            uniforms_final=torch.zeros(1, dtype=torch.float64),
        )
