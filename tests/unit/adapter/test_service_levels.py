"""Weights follow priority and lateness, on every rank alike."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

pytest.importorskip("sglang")

from sglang_tetris.adapter import service_levels
from sglang_tetris.adapter.rank_agreement import RankAgreement
from sglang_tetris.adapter.request_settings import settings_of
from sglang_tetris.adapter.service_levels import ServiceLevels
from sglang_tetris.core.config import TetrisConfig
from sglang_tetris.core.round_plan import RoundPlan


class Alone:
    world_size, rank_in_group = 1, 0


def request(priority: int | None = None, **tetris: float) -> SimpleNamespace:
    params = SimpleNamespace(
        custom_params={"tetris": tetris} if tetris else None,
        top_k=1,
        temperature=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        repetition_penalty=1.0,
        min_new_tokens=0,
        logit_bias=None,
    )
    return SimpleNamespace(
        sampling_params=params,
        priority=priority,
        grammar=None,
        custom_logit_processor=None,
        output_ids=[],
    )


def weights(reqs: list, config: TetrisConfig, high_first: bool = True):
    levels = ServiceLevels(RankAgreement(Alone()))
    settings = [settings_of(req, config, high_first) for req in reqs]
    return levels.weights(reqs, settings)


def test_without_priorities_and_targets_there_are_no_weights() -> None:
    assert weights([request(), request()], TetrisConfig()) is None
    # A priority without the factor changes nothing.
    assert weights([request(3), request()], TetrisConfig()) is None


@pytest.mark.parametrize(("high_first", "first"), [(True, 4.0), (False, 0.25)])
def test_priority_raises_the_weight_in_the_schedulers_own_order(high_first, first):
    config = TetrisConfig(priority_weight=2.0)
    assert weights([request(2), request()], config, high_first) == [first, 1.0]


def test_a_request_behind_its_target_counts_more(monkeypatch) -> None:
    now = [10.0]
    monkeypatch.setattr(service_levels.time, "perf_counter", lambda: now[0])
    late, early, free = (
        request(target_tpot_ms=10),
        request(target_tpot_ms=500),
        request(),
    )
    reqs = [late, early, free]
    config = TetrisConfig()
    assert weights(reqs, config) is None, "nobody is late before the first token"
    now[0] += 0.2
    for req in reqs:
        req.output_ids += [1] * 10
    assert weights(reqs, config) == pytest.approx([2.0, 1.0, 1.0])
    now[0] += 60
    assert weights(reqs, config)[0] == 8.0, "lateness is bounded"


def test_the_servers_target_holds_for_requests_without_their_own(monkeypatch) -> None:
    now = [10.0]
    monkeypatch.setattr(service_levels.time, "perf_counter", lambda: now[0])
    reqs = [request(), request(target_tpot_ms=1000)]
    config = TetrisConfig(target_tpot_ms=10)
    weights(reqs, config)
    now[0] += 0.4
    for req in reqs:
        req.output_ids += [1] * 10
    assert weights(reqs, config) == pytest.approx([4.0, 1.0])


def _agree(rank: int, file: str, found) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=2
    )
    group = SimpleNamespace(
        world_size=2, rank_in_group=rank, first_rank=0, cpu_group=dist.group.WORLD
    )
    agreement = RankAgreement(group)
    own = RoundPlan(
        depth=3,
        num_drafting=None,
        draft_budget=17,
        least_budget=2,
        reason="probe",
        rates=(1.0, 2.0),
        reads_prompts=False,
    )
    plan = agreement.plan(own if agreement.decides else None)
    found[rank] = (
        (plan.depth, plan.num_drafting, plan.draft_budget, plan.least_budget),
        plan.reason,
        plan.reads_prompts,
        agreement.text(f"of rank {rank}"),
        agreement.number(40 + rank),
        agreement.reals([rank + 0.5, rank + 0.25]),
    )
    dist.destroy_process_group()


def test_the_other_ranks_take_rank_0s_numbers(tmp_path) -> None:
    with mp.Manager() as manager:
        found = manager.dict()
        mp.spawn(_agree, args=(str(tmp_path / "meet"), found), nprocs=2)
        assert found[0] == found[1]
        said = ("probe", False, "of rank 0", 40, [0.5, 0.25])
        assert found[0] == ((3, None, 17, 2), *said)
