"""Each policy does what its name says, and only the oracle sees the future."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from sglang_tetris.core.round_cost import Load
from sglang_tetris.core.round_plan import RoundPlan
from sglang_tetris.simulator.calibrator import LearntCalibration, NoCalibration
from sglang_tetris.simulator.clock import Clock
from sglang_tetris.simulator.policies.base import FinishedRound
from sglang_tetris.simulator.policies.catalog import AUTO, BASELINES, OTHERS, Catalog
from sglang_tetris.simulator.policies.dsd import GlobalRate
from sglang_tetris.simulator.policies.oracle import Oracle
from sglang_tetris.simulator.server import KEPT_TOKENS
from sglang_tetris.simulator.trees import RoundTrees
from tests.unit.simulator.worlds import TABLE, chain, flat, recorded

LOAD = Load(batch_size=6, num_drafting=6, total_kv_tokens=600)


@pytest.fixture
def catalog(recording) -> Catalog:
    return Catalog(recording, TABLE, NoCalibration)


def drafted(recording, policy, depth: int, requests: int = 6) -> RoundTrees:
    rows = np.arange(0, 60 * requests, 60)
    classes = np.zeros(requests, np.int64)
    return RoundTrees(recording, policy.topk, rows, depth, classes)


def chosen(recording, policy):
    """Return the plan, the trees, and the choice as a mask."""
    plan = policy.plan(LOAD)
    trees = drafted(recording, policy, plan.depth)
    choice = policy.choose(plan, LOAD, trees)
    mask = (trees.depths <= choice) if isinstance(choice, int) else choice
    return plan, trees, mask & (trees.depths > 0)


def test_every_listed_policy_can_be_made(catalog):
    for name in (*BASELINES, *OTHERS, *AUTO, "oracle-2x", "oracle-free"):
        assert catalog.make(name).name == name
    with pytest.raises(ValueError, match="'best'"):
        catalog.make("best")


def test_none_drafts_nothing_and_has_no_draft(catalog):
    policy = catalog.make("none")
    assert policy.plan(LOAD).depth == 0
    assert policy.drafts is False


@pytest.mark.parametrize("k", [1, 5, 8])
def test_fixed_verifies_k_of_each(recording, catalog, k):
    plan, trees, mask = chosen(recording, catalog.make(f"fixed-{k}"))
    assert plan.depth == k
    assert mask.sum(1).tolist() == [k] * 6
    assert trees.num_chosen(k) == 6 * k
    # The short way of counting is the long one.
    assert trees.num_correct(k).tolist() == trees.num_correct(mask).tolist()


def test_a_fixed_tree_has_its_size_for_every_request(recording, catalog):
    plan, trees, mask = chosen(recording, catalog.make("tree-3/6"))
    assert plan.depth == 3
    assert mask.sum(1).tolist() == [6] * 6
    survival = trees.survival(trees.probs)
    for row in range(6):
        kept = survival[row][mask[row]].min()
        assert kept >= survival[row][~mask[row] & (trees.depths[row] > 0)].max()


def test_the_paper_moves_its_capacity_within_the_batch(recording, catalog):
    plan, trees, mask = chosen(recording, catalog.make("paper-2+1"))
    assert plan.depth == 3
    assert mask.sum() == 12
    assert len(set(mask.sum(1).tolist())) > 1
    survival = trees.survival(trees.probs)
    assert survival[mask].min() >= survival[~mask].max()


def test_ours_uses_calibrated_survival(recording):
    class Reversed(NoCalibration):
        def calibrate(self, trees):
            return 1 - trees.probs

    policy = Catalog(recording, TABLE, Reversed).make("ours-1x-trees")
    _, trees, mask = chosen(recording, policy)
    survival = trees.survival(1 - trees.probs)
    assert mask.sum() == 6
    outside = ~mask & (trees.depths > 0)
    assert survival[mask].min() >= survival[outside].max()


def finished(trees: RoundTrees, choice: int) -> FinishedRound:
    return FinishedRound(
        plan=RoundPlan(depth=trees.depth),
        load=LOAD,
        trees=trees,
        choice=choice,
        num_drafts=trees.num_chosen(choice),
        num_correct=int(trees.num_correct(choice).sum()),
        parts=(),
    )


@pytest.mark.parametrize(
    ("row_ms", "correct", "best"), [(0.001, 3, 3), (0.001, 0, 0), (30, 1, 0)]
)
def test_dsd_chooses_k_by_its_rate_and_the_costs(tmp_path, row_ms, correct, best):
    """3 of 3 correct: as deep as may be; half of them, at free rows, in between."""
    from tests.unit.simulator.worlds import flat

    found = recorded(tmp_path, [chain(0.9, 0.9, 0.9, correct=correct)] * 300)
    policy = GlobalRate("dsd", Clock(flat(20, row_ms)), most=3)
    for _ in range(40):
        plan = policy.plan(LOAD)
        if plan.depth:
            trees = RoundTrees(
                found, 1, np.arange(6), plan.depth, np.zeros(6, np.int64)
            )
            policy.observe(finished(trees, policy.choose(plan, LOAD, trees)))
    assert policy.plan(LOAD).depth == best
    # With one of three correct the second was tried in vain, the third was not.
    assert policy.rate == pytest.approx(correct / min(correct + 1, 3))


def test_the_oracle_verifies_what_is_correct_and_nothing_else(recording, catalog):
    policy = catalog.make("oracle-free")
    plan, trees, mask = chosen(recording, policy)
    assert plan.depth == recording.trees.max_depth
    assert (mask == trees.is_correct).all()
    assert mask.sum() > 0


def test_the_oracle_with_a_budget_takes_the_first_of_each_path(recording, catalog):
    _, trees, mask = chosen(recording, catalog.make("oracle-1x"))
    assert (mask <= trees.is_correct).all()
    assert mask.sum() == min(6, trees.is_correct.sum())
    # Ancestors first: what is kept of a request is the beginning of its path.
    for row in range(6):
        kept = trees.depths[row][mask[row]]
        assert sorted(kept) == list(range(1, len(kept) + 1))


def test_the_oracle_drafts_only_as_deep_as_pays(recording, catalog):
    policy = catalog.make("oracle-trees")
    # A verify of 20 ms beside a decode of 10: one correct draft each is too little.
    for lens, deepest in (([0] * 6, 0), ([1] * 6, 0), ([2] * 6, 2), ([8] * 6, 8)):
        policy.foresee(partial(lambda found, _topk: found, np.array(lens)), 6)
        assert policy.plan(LOAD).depth == deepest


def test_the_oracle_reads_what_it_skipped_once_that_would_have_paid() -> None:
    """384 tokens take 37 ms more than 12; each round that drafts would save some."""
    reading = replace(TABLE, phases=TABLE.phases | {"draft_extend": flat(0, 0.1)})
    policy = Oracle("oracle", topk=3, max_depth=8, clock=Clock(reading))
    policy.foresee(lambda _topk: np.array([2] * 6), 6 * KEPT_TOKENS)
    depths = [policy.plan(LOAD).depth for _ in range(30)]
    assert depths[0] == 0, "not for one round"
    assert 2 in depths
    # What is drafted at once has nothing to catch up on.
    policy.foresee(lambda _topk: np.array([2] * 6), 6)
    assert policy.plan(LOAD).depth == 2


def test_auto_does_not_see_what_will_be_correct(recording):
    """The same probabilities, other texts: the same plans and choices."""
    catalog = Catalog(recording, TABLE, NoCalibration)
    one, two = (catalog.make("auto-trees+profile") for _ in range(2))
    for policy, lies in ((one, False), (two, True)):
        plan = policy.plan(LOAD)
        trees = drafted(recording, policy, plan.depth)
        if lies:
            trees.__dict__["is_correct"] = ~trees.is_correct
        policy.seen = policy.choose(plan, LOAD, trees)
    assert (one.seen == two.seen).all()
    assert one.seen.any()


def test_calibration_learns_only_where_the_text_went(tmp_path):
    """0 is right, its child 1 wrong; 2 below 1 was compared with another text."""
    row = ([-1, 0, 1], [0.9, 0.9, 0.9], [0])
    found = recorded(tmp_path, [row] * 100)
    trees = RoundTrees(found, 1, np.arange(50), 3, np.zeros(50, np.int64))
    taught = LearntCalibration()
    for _ in range(20):
        taught.update(trees, 3)
    first, second, third = taught.calibrate(trees)[0].tolist()
    assert first > 0.9
    assert second < 0.2
    assert third > second, "nothing was seen of it"


def test_requests_that_end_teach_nothing(tmp_path):
    """The last two drafts would have been right, but there the text is over."""
    found = recorded(tmp_path, [chain(0.5, 0.5, correct=2)] * 2)
    trees = RoundTrees(found, 1, np.array([1]), 2, np.zeros(1, np.int64))
    taught = LearntCalibration()
    for _ in range(50):
        taught.update(trees, 2)
    assert taught.calibrate(trees)[0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(("suffix", "reads"), [("", False), ("+reading", True)])
def test_auto_reads_prompts_while_it_drafts_nothing_only_if_it_must(
    recording, suffix, reads
):
    policy = Catalog(recording, TABLE, NoCalibration).make(f"auto-trees{suffix}")
    nobody = Load(batch_size=4, num_drafting=0, total_kv_tokens=400)
    assert policy.plan(LOAD).reads_prompts, "while it explores"
    assert policy.plan(nobody).reads_prompts is reads
