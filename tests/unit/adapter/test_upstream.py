"""The list of SGLang symbols fits what is installed, and notices what does not."""

import pytest

pytest.importorskip("sglang", reason="the adapter needs SGLang")

from sglang_tetris.adapter import hooks, upstream
from sglang_tetris.adapter.cpu_device.hooks import FOLLOWERS, REPLACEMENTS, WRAPPERS


def test_the_installed_sglang_fits() -> None:
    assert upstream.installed_version() == upstream.SUPPORTED_VERSION
    assert upstream.check() == []


def test_a_changed_signature_and_a_missing_symbol_are_reported() -> None:
    name = "sglang.srt.sampling.sampling_params.SamplingParams.verify"
    assert upstream.check({name: "self vocab_size"}) == []
    (changed,) = upstream.check({name: "self vocab_size strict"})
    assert "(self vocab_size)" in changed
    (missing,) = upstream.check({f"{name}_all": "self"})
    assert f"{name}_all" in missing


def test_every_hook_is_on_the_list() -> None:
    targets = {target for target, _, _ in hooks.HOOKS}
    targets |= {*REPLACEMENTS, *WRAPPERS, *FOLLOWERS}
    assert targets <= set(upstream.expected_symbols())


def test_a_mismatch_leaves_sglang_alone(monkeypatch, caplog) -> None:
    from sglang_tetris import plugin
    from sglang_tetris.adapter import algorithm

    monkeypatch.setattr(upstream, "check", lambda: ["one.symbol takes (a), not (b)"])
    registered = []
    monkeypatch.setattr(algorithm, "register", lambda: registered.append("algorithm"))
    monkeypatch.setattr(hooks, "register", lambda: registered.append("hooks"))
    plugin.register()
    assert registered == []
    assert "doctor" in caplog.text
