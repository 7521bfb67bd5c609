"""The patch tool, and the patch of this repository on the wheel it is made for."""

import base64
import csv
import hashlib
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from sglang_tetris.tools.patch import PatchConflictError, main, patched_text, state

PATCHES = Path(__file__).resolve().parents[3] / "patches"
PROBE = Path(__file__).with_name("draft_counts_probe.py")
VERSION = "0.5.23"


def unpack_installed(folder: Path) -> None:
    """Write the Python files of the installed sglang to `folder`, as in its wheel.

    RECORD holds the wheel's own checksum of every file: a file that was changed since
    is not copied but fails the test.
    """
    installed = distribution("sglang")
    rows = csv.reader((installed.read_text("RECORD") or "").splitlines())
    for name, recorded, _size in rows:
        if not recorded or not name.startswith("sglang"):
            continue
        if not name.endswith((".py", "/METADATA")):
            continue
        content = Path(str(installed.locate_file(name))).read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
        found = f"sha256={digest.decode().rstrip('=')}"
        assert found == recorded, f"{name} is not as in the wheel: reinstall sglang"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def checksums(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file()
    }


def run_tool(wheel: Path, action: str, capsys) -> str:
    assert main(["--wheel", str(wheel), action]) == 0
    return capsys.readouterr().out


def run_probe(overlay: Path | None, tmp_path: Path) -> dict:
    command = [sys.executable, str(PROBE)] + ([str(overlay)] if overlay else [])
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    try:
        if distribution("sglang").version != VERSION:
            pytest.skip(f"needs sglang {VERSION}")
    except PackageNotFoundError:
        pytest.skip("needs sglang (the serve extra)")
    folder = tmp_path_factory.mktemp("wheel")
    unpack_installed(folder)
    return folder


def test_apply_compile_behave_revert(wheel, tmp_path, capsys):
    before = checksums(wheel)
    assert "unpatched" in run_tool(wheel, "check", capsys)
    run_tool(wheel, "apply", capsys)
    assert ": patched" in run_tool(wheel, "check", capsys)
    changed = [n for n, digest in checksums(wheel).items() if before[n] != digest]
    assert len(changed) == 11
    for name in changed:
        compile((wheel / name).read_text(), name, "exec")
    overlay = tmp_path / "overlay"
    for name in changed:
        (overlay / name).parent.mkdir(parents=True, exist_ok=True)
        (overlay / name).write_bytes((wheel / name).read_bytes())

    stock, patched = run_probe(None, tmp_path), run_probe(overlay, tmp_path)

    # Two rounds of four drafts each; verified: 3 + 2 and 0 + 1, correct: 2 + 1, 0 + 1.
    capped = patched["capped"]
    for channel in ("meta_info", "openai"):
        assert [m["spec_num_verify_drafts"] for m in capped[channel]] == [5, 1]
        assert [m["spec_num_correct_drafts"] for m in capped[channel]] == [3, 1]
        assert [m["spec_num_proposed_drafts"] for m in capped[channel]] == [8, 8]
        assert [m["spec_accept_rate"] for m in capped[channel]] == [3 / 5, 1.0]
    assert capped["logged_accept_rate"] == round(4 / 6, 2)
    # The fault that the patch mends: trimmed drafts counted as wrong ones.
    assert stock["capped"]["meta_info"][1]["spec_accept_rate"] == 1 / 8
    assert stock["capped"]["logged_accept_rate"] == round(4 / 16, 2)
    # A worker that does not trim sees only the new key.
    for channel in ("meta_info", "openai"):
        for meta in patched["full"][channel]:
            assert meta.pop("spec_num_verify_drafts") == 8
    assert patched["full"] == stock["full"]

    run_tool(wheel, "revert", capsys)
    assert checksums(wheel) == before


def test_apply_and_revert_twice_change_nothing_more(wheel, capsys):
    before = checksums(wheel)
    assert ": 0 files" in run_tool(wheel, "revert", capsys)
    assert ": 11 files" in run_tool(wheel, "apply", capsys)
    assert ": 0 files" in run_tool(wheel, "apply", capsys)
    assert ": 11 files" in run_tool(wheel, "revert", capsys)
    assert checksums(wheel) == before


def test_patches_are_small():
    for patch in PATCHES.glob("sglang-*/*.patch"):
        lines = patch.read_text().splitlines()
        changed = [
            line
            for line in lines
            if line.startswith(("+", "-")) and not line.startswith(("+++", "---"))
        ]
        assert len(changed) < 100, patch.name
        assert patch.name in (PATCHES / "README.md").read_text()


# The tool itself, on a wheel of one file and two patches to it.

FIRST = """\
--- a/sglang/x.py
+++ b/sglang/x.py
@@ -1,3 +1,4 @@
 one
+one and a half
 two
 three
"""
SECOND = """\
--- a/sglang/x.py
+++ b/sglang/x.py
@@ -2,3 +2,2 @@
 one and a half
-two
 three
"""


@pytest.fixture
def small(tmp_path):
    wheel, patches = tmp_path / "w", tmp_path / "p"
    info = wheel / "sglang-9.9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: sglang\nVersion: 9.9.9"
    )
    (wheel / "sglang").mkdir()
    (wheel / "sglang" / "x.py").write_text("one\ntwo\nthree\n")
    (patches / "sglang-9.9.9").mkdir(parents=True)
    (patches / "sglang-9.9.9" / "0001-a.patch").write_text(FIRST)
    (patches / "sglang-9.9.9" / "0002-b.patch").write_text(SECOND)
    return wheel, patches


def test_patches_build_on_each_other(small):
    wheel, patches = small
    arguments = ["--wheel", str(wheel), "--patches", str(patches)]
    assert main([*arguments, "apply"]) == 0
    assert (wheel / "sglang/x.py").read_text() == "one\none and a half\nthree\n"
    assert main([*arguments, "revert"]) == 0
    assert (wheel / "sglang/x.py").read_text() == "one\ntwo\nthree\n"


@pytest.mark.parametrize("action", ["apply", "check", "revert"])
def test_a_conflict_changes_nothing_and_names_the_place(small, action, capsys):
    wheel, patches = small
    (wheel / "sglang/x.py").write_text("one\n2\nthree\n")
    assert main(["--wheel", str(wheel), "--patches", str(patches), action]) == 1
    assert "sglang/x.py: the hunk for line 1" in capsys.readouterr().err
    assert (wheel / "sglang/x.py").read_text() == "one\n2\nthree\n"
    assert sorted(f.name for f in (wheel / "sglang").iterdir()) == ["x.py"]


def test_a_half_applied_set_is_a_conflict(small):
    wheel, patches = small
    files = sorted((patches / "sglang-9.9.9").iterdir())
    (wheel / "sglang/x.py").write_text("one\none and a half\ntwo\nthree\n")
    with pytest.raises(PatchConflictError):
        state(wheel, files)


def test_odd_line_ends_survive():
    from unidiff import PatchSet

    text = "one\ntwo\x0c\u2028\nthree\r\nfour"
    diff = "--- a/f\n+++ b/f\n@@ -1,1 +1,2 @@\n one\n+new\n"
    (patched,) = PatchSet(diff)
    assert patched_text(text, patched) == text.replace("one\n", "one\nnew\n")


@pytest.mark.parametrize("kind", ["no wheel", "other version", "missing file"])
def test_what_is_missing_is_named(small, kind, capsys):
    wheel, patches = small
    if kind == "no wheel":
        wheel = patches
    elif kind == "other version":
        patches = patches / "sglang-9.9.9"
    else:
        (wheel / "sglang/x.py").unlink()
    assert main(["--wheel", str(wheel), "--patches", str(patches), "check"]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert {"no wheel": "holds no", "other version": "9.9.9"}.get(
        kind, "x.py"
    ) in message
