"""Per-request limits, the control endpoint, and numbers that agree with each other."""

import re
from pathlib import Path

import psutil
import pytest

from tests.e2e import models
from tests.e2e.pool import ServerPool, set_budget, tetris_flags, tetris_info
from tests.e2e.servers import Server
from tests.e2e.test_exactness_tiny import CHAIN, prompts

pytestmark = pytest.mark.server("self-chain")


@pytest.fixture
def server(pool: ServerPool, model_root: Path) -> Server:
    """A server whose draft is the target itself: every verified draft is right."""
    target = models.make_target(model_root)
    found = pool.get(target, tetris_flags(target, **CHAIN))
    set_budget(found, "3x")
    return found


def _tetris(limit: object) -> dict:
    return {"custom_params": {"tetris": {"max_drafts": limit}}}


@pytest.mark.parametrize("limit", [0, 1, 2, 99])
def test_a_request_can_limit_its_drafts(server: Server, limit: int) -> None:
    (reply,) = server.generate(prompts(1), max_new_tokens=20, **_tetris(limit))
    meta = reply["meta_info"]
    assert meta["tetris"]["max_drafts"] == limit
    assert meta["spec_num_verify_drafts"] <= limit * meta["spec_verify_ct"]
    if limit == 0:
        assert meta["spec_verify_ct"] == 19, "one token a round is plain decoding"


@pytest.mark.parametrize("limit", [-1, "two", 1.5, True, [1]])
def test_a_malformed_limit_is_a_400(server: Server, limit: object) -> None:
    with pytest.raises(RuntimeError, match=r": 400 .*max_drafts"):
        server.generate(prompts(1), **_tetris(limit))


def test_an_unknown_key_is_a_400(server: Server) -> None:
    with pytest.raises(RuntimeError, match=r": 400 .*max_draft"):
        server.generate(prompts(1), custom_params={"tetris": {"max_draft": 1}})


@pytest.mark.parametrize(
    "request_fields",
    [{"return_sampling_mask": True}, {"return_hidden_states": True}],
)
def test_what_cannot_be_returned_is_refused(server: Server, request_fields) -> None:
    with pytest.raises(RuntimeError, match=r": 400 "):
        server.generate(prompts(1), request=request_fields, top_k=1)
    assert server.generate(prompts(1), max_new_tokens=2), "the server lives"


def test_beam_search_is_refused(server: Server) -> None:
    with pytest.raises(RuntimeError, match=r": 400 "):
        server.generate(prompts(1), beam_width=2)
    assert server.generate(prompts(1), max_new_tokens=2), "the server lives"


def test_logprobs_of_every_emitted_token(server: Server) -> None:
    asked = {"return_logprob": True, "top_logprobs_num": 2}
    (reply,) = server.generate(prompts(1), max_new_tokens=20, request=asked)
    chosen = reply["meta_info"]["output_token_logprobs"]
    top = reply["meta_info"]["output_top_logprobs"]
    assert [token for _, token, _ in chosen] == reply["output_ids"]
    for (value, token, _), ((best, best_token, _), _) in zip(chosen, top, strict=True):
        assert (value, token) == (best, best_token), "greedy takes the best"


def test_other_custom_params_are_left_alone(server: Server) -> None:
    (reply,) = server.generate(prompts(1), custom_params={"mine": {"x": 1}})
    assert reply["meta_info"]["tetris"]["max_drafts"] is None


def test_the_drafts_memory_is_reported(server: Server) -> None:
    memory = tetris_info(server)["draft_memory"]
    # A draft of the target's own size takes what the target takes.
    assert memory["weight_bytes"] > 0
    assert memory["kv_bytes"] > 0
    assert memory["target_tokens"] > tetris_info(server)["kv_pool"]["size"]
    assert f"the room of {memory['target_tokens']} tokens" in server.log()


def test_whole_steps_are_warmed_up(server: Server) -> None:
    """By the worker itself: an `Engine` sends no warm-up request as a server does."""
    # Two drafts for each of the 1 + 2 + 5 requests.
    warmed_up = "samplers, steps of 1, 2, 5 requests with 16 drafts."
    assert warmed_up in server.log()


def test_the_launcher_forked_its_processes(server: Server) -> None:
    """A process that spawns others keeps a resource tracker beside them."""
    children = psutil.Process(server.process.pid).children()
    commands = [" ".join(child.cmdline()) for child in children]
    assert any("sglang::scheduler" in command for command in commands)
    assert not any("resource_tracker" in command for command in commands)


def test_a_bad_budget_is_rejected_and_changes_nothing(server: Server) -> None:
    with pytest.raises(RuntimeError, match=r": 400 .*lots"):
        server.post("/tetris/budget", {"draft_budget": "lots"})
    asked = {"server_args": {"tetris_budget": -7}}
    assert server.post("/set_internal_state", asked) == [False]
    assert tetris_info(server)["draft_budget"] == "3x"


def test_sglangs_own_door_takes_numbers(server: Server) -> None:
    for asked, shown in (
        ({"tetris_budget": 16}, "16"),
        ({"tetris_drafts_per_request": 2}, "2x"),
        ({"tetris_budget": -1}, "auto"),
    ):
        # One entry per data-parallel rank.
        assert server.post("/set_internal_state", {"server_args": asked}) == [True]
        assert tetris_info(server)["draft_budget"] == shown


def test_auto_says_what_it_does_and_why(server: Server) -> None:
    set_budget(server, "auto")
    server.generate(prompts(8), max_new_tokens=60)
    state = tetris_info(server)
    plan = state["plan"]
    assert plan["exploring"] is False, "known within the first hundred rounds"
    assert plan["reason"] in ("rate", "probe", "check")
    assert len(plan["tokens_per_s"]) == CHAIN["steps"] + 1
    # It stays for a while where another depth is better by a little.
    rates = plan["tokens_per_s"]
    assert rates[plan["depth"]] >= 0.7 * max(rates)
    log = server.log()
    assert "no cost table was given" in log
    assert "what a round costs is known now" in log
    assert re.search(r"budget: auto = \d+, depth \d \(\w+\), tokens/s expected", log)
    # Draft = target: that is what the calibration has learnt of greedy requests.
    greedy = state["calibration"]["classes"]["greedy"]
    assert greedy["accept_rate"] == pytest.approx(1.0)
    set_budget(server, "3x")


def test_sums_of_requests_logs_and_metrics_agree(server: Server) -> None:
    set_budget(server, "4")
    before = tetris_info(server)["totals"]
    replies = server.generate(prompts(6), max_new_tokens=20)
    after = tetris_info(server)["totals"]
    for name, key in (
        ("num_rounds", "spec_verify_ct"),
        ("num_proposed_drafts", "spec_num_proposed_drafts"),
        ("num_verify_drafts", "spec_num_verify_drafts"),
        ("num_correct_drafts", "spec_num_correct_drafts"),
        ("num_trimmed_drafts", "spec_num_trimmed_drafts"),
    ):
        asked = sum(reply["meta_info"][key] for reply in replies)
        assert after[name] - before[name] == asked, name
    assert after["num_trimmed_drafts"] > before["num_trimmed_drafts"], "4 < 3 x 6"
    for reply in replies:
        meta = reply["meta_info"]
        rate = meta["spec_num_correct_drafts"] / meta["spec_num_verify_drafts"]
        assert meta["spec_accept_rate"] == pytest.approx(rate)
        assert meta["tetris"]["draft_budget"] == "4"
    metrics = _metrics(server)
    for name in ("num_rounds", "num_verify_drafts", "num_correct_drafts"):
        assert metrics[f"sglang:tetris_{name}_total"] == after[name]
    assert "TETRIS: #round" in server.log()
    assert metrics["sglang:tetris_draft_budget"] == 4
    # Draft = target: whatever was verified was right, in SGLang's own gauge too.
    assert metrics["sglang:spec_accept_rate"] == pytest.approx(1.0)


def _metrics(server: Server) -> dict[str, float]:
    import urllib.request

    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    values = {}
    for line in lines:
        if line.startswith("sglang:"):
            name, value = line.rsplit(" ", 1)
            values[name.split("{")[0]] = float(value)
    return values
