"""profile_cost from its command line to its files; only the server is made up.

The server's rounds take exactly what a known table says, so what is written must say
the same.
"""

import json
import sys
import threading
import time
import urllib.request
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("rich")

from sglang_tetris.core.cost_table import PHASES, CostSample, CostTable
from sglang_tetris.tools import profile_cost
from sglang_tetris.tools.prepare_model import PreparedModels
from sglang_tetris.tools.server_process import free_port, running_command
from tests.unit.tools.profiled_server import TRUE, FakeServer, part, sample

WAIT_S = 20  # no test waits so long
FLAGS = ("--model-path", "/models/some-target", "--dtype", "float32")


def grid(table: CostTable) -> list[CostSample]:
    tokens = (1, 2, 4, 8, 16, 32, 64)
    return [
        sample(table, *place) for place in product(tokens, (1, 2, 4), (50, 400, 3000))
    ]


@pytest.fixture
def server(monkeypatch) -> FakeServer:
    fake = FakeServer()
    monkeypatch.setattr(profile_cost, "running_server", fake.start)
    monkeypatch.setattr(profile_cost, "exit_on_signals", lambda: None)
    monkeypatch.setattr(urllib.request, "urlopen", fake.urlopen)
    monkeypatch.setattr(profile_cost, "TIMEOUT_S", WAIT_S)
    return fake


@pytest.fixture
def thread_errors(monkeypatch) -> list[object]:
    found: list[object] = []
    monkeypatch.setattr(threading, "excepthook", found.append)
    return found


def command(output: Path, *flags: str) -> list[str]:
    few = ("--concurrency", "2", "3", "--rounds", "3")
    return [str(output), *few, "--", *(flags or FLAGS)]


def assert_one_sentence(capsys, said: str) -> None:
    error = capsys.readouterr().err
    assert error.startswith("profile_cost: ")
    assert said in error
    assert error.count("\n") == 1


def test_a_fit_gives_back_the_table_that_the_samples_are_of() -> None:
    samples = {name: grid(part(name)) for name in ("verify", *PHASES)}
    table = profile_cost.fit(samples)
    assert set(table.phases) == set(PHASES)
    for name in samples:
        fitted, true = (table if name == "verify" else table.phases[name]), part(name)
        assert fitted.per_request_s == pytest.approx(true.per_request_s, rel=1e-3)
        assert fitted.per_kv_token_s == pytest.approx(true.per_kv_token_s, rel=1e-3)
        at = dict(zip(fitted.token_knots, fitted.knot_times_s, strict=True))
        assert [at[knot] for knot in true.token_knots] == pytest.approx(
            true.knot_times_s, rel=1e-3
        )


@pytest.mark.parametrize("missing", ["verify", "decode"])
def test_a_fit_needs_rounds_with_and_without_drafts(missing: str) -> None:
    samples = {name: grid(part(name)) for name in ("verify", "decode", "outside")}
    del samples[missing]
    with pytest.raises(ValueError, match=rf"phases \['{missing}'\]"):
        profile_cost.fit(samples)


def test_what_is_written_is_a_table_with_its_provenance(
    server, tmp_path, capsys, monkeypatch
) -> None:
    drawn = []
    monkeypatch.setattr(profile_cost, "plot", lambda *values: drawn.append(values[-1]))
    output = tmp_path / "new" / "cost.json"
    assert profile_cost.main(command(output)) == 0
    text = output.read_text()
    table = CostTable.from_json(text)
    assert set(table.phases) == set(PHASES)
    for place in ((3, 2, 300), (4, 2, 600)):
        wanted = sample(TRUE, *place).step_time_s
        assert sample(table, *place).step_time_s == pytest.approx(wanted, rel=0.02)
    origin = json.loads(text)["provenance"]
    assert origin["command"].startswith("python -m sglang_tetris.tools.profile_cost ")
    assert "commit" in origin
    assert {"versions", "machine", "started", "finished"} <= set(origin)
    assert origin["measured"] is True
    assert origin["model"] == "/models/some-target"
    assert origin["flags"] == list(FLAGS) == list(server.flags[: len(FLAGS)])
    assert set(origin["samples"]) == {"verify", *PHASES}
    assert min(origin["samples"].values()) > 0
    assert drawn == [output.with_suffix(".png")]
    num_loads = 2 * len(profile_cost.SAMPLING)
    assert server.budgets == list(profile_cost.BUDGETS) * num_loads
    printed = capsys.readouterr()
    assert "100%" in printed.out, "the progress bar belongs on the console"
    assert "3 x sorted" in printed.out
    assert printed.err == ""


def test_a_plot_is_written_beside_it(server, tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    output = tmp_path / "cost.json"
    assert profile_cost.main(command(output)) == 0
    image = output.with_suffix(".png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) > 10_000
    assert f"wrote {output} and {output.with_suffix('.png')}" in " ".join(
        capsys.readouterr().out.replace("\n", "").split()
    )


def test_without_flags_those_of_the_demo_are_named(server, tmp_path, monkeypatch):
    names = PreparedModels.__slots__
    models = PreparedModels(**{name: tmp_path / f"the-{name}" for name in names})
    monkeypatch.setattr(profile_cost, "prepare", lambda: models)
    monkeypatch.setattr(profile_cost, "plot", lambda *_: None)
    output = tmp_path / "cost.json"
    assert profile_cost.main(command(output)[: -len(FLAGS)]) == 0
    origin = json.loads(output.read_text())["provenance"]
    assert origin["model"] == str(tmp_path / "the-target")
    assert "--speculative-draft-model-path" in origin["flags"]
    tokens = 3 * (profile_cost.MAX_TOKENS + profile_cost.LONGEST_PROMPT)
    assert origin["flags"][-2:] == ["--max-total-tokens", str(tokens)]


@pytest.mark.parametrize(
    ("flags", "model"),
    [(["--model", "a"], "a"), (["--model-path=b", "--tp", "2"], "b"), (["--tp"], None)],
)
def test_the_model_is_read_from_the_flags(flags, model) -> None:
    assert profile_cost.model_of(flags) == model


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("c.json", ("--concurrency", "4", "0"), "--concurrency must be at least 1"),
        ("c.json", ("--rounds", "0"), "--rounds must be at least 1, got 0"),
        ("c.png", (), "output must be a JSON file"),
        (".", (), "output must be a JSON file"),
        ("a-file/c.json", (), "a-file"),
    ],
)
def test_bad_arguments_are_one_sentence_before_anything_starts(
    server, tmp_path, capsys, name, more, said
) -> None:
    (tmp_path / "a-file").touch()
    assert profile_cost.main([str(tmp_path / name), *more, "--", *FLAGS]) == 1
    assert_one_sentence(capsys, said)
    assert not server.flags


def test_a_model_that_cannot_be_prepared_is_one_sentence(
    server, tmp_path, capsys, monkeypatch
) -> None:
    def fail() -> None:
        raise RuntimeError("The model could not be downloaded: check the network.")

    monkeypatch.setattr(profile_cost, "prepare", fail)
    assert profile_cost.main([str(tmp_path / "cost.json")]) == 1
    assert_one_sentence(capsys, "check the network")


def test_a_server_that_does_not_start_is_a_sentence_and_its_log(
    tmp_path, capsys, monkeypatch
) -> None:
    program = "print('error: no such flag'); raise SystemExit(3)"

    def start(flags: tuple[str, ...], *, log_path: Path):
        launch = [sys.executable, "-c", program]
        return running_command(launch, free_port(), log_path=log_path)

    monkeypatch.setattr(profile_cost, "running_server", start)
    monkeypatch.setattr(profile_cost, "exit_on_signals", lambda: None)
    output = tmp_path / "cost.json"
    assert profile_cost.main(command(output)) == 1
    first, *log = capsys.readouterr().err.splitlines()
    assert first.startswith("profile_cost: The server ended with status 3.")
    assert log == ["error: no such flag"]
    assert not output.exists()


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ({"dies_after": 10}, "The server ended with status -9."),
        ({"refuses_after": 10}, "http://fake/generate: HTTP Error 400: Bad Request"),
        ({"is_silent": True}, "the server ran no 3 rounds in 0.4 s"),
    ],
)
def test_a_server_that_dies_or_refuses_or_hangs_is_one_sentence(
    server, tmp_path, capsys, monkeypatch, thread_errors, trouble, said
) -> None:
    if "is_silent" in trouble:
        monkeypatch.setattr(profile_cost, "TIMEOUT_S", 0.4)
    for name, value in trouble.items():
        setattr(server, name, value)
    output = tmp_path / "cost.json"
    begin = time.monotonic()
    assert profile_cost.main(command(output)) == 1
    assert_one_sentence(capsys, said)
    assert time.monotonic() - begin < WAIT_S, "it waited instead of noticing"
    assert thread_errors == [], "a traceback per running request"
    assert not output.exists()
