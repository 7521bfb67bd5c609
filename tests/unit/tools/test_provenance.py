"""A result says where it comes from, and never names a commit that is not its own."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("psutil")

from sglang_tetris.tools import provenance as tool

ROOT = Path(__file__).resolve().parents[3]


def test_it_names_command_commit_versions_machine_and_date(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"{ROOT}/benchmark/x.py", "--name", "two words"])
    record = tool.provenance()
    assert record["command"] == "python benchmark/x.py --name 'two words'"
    assert record["versions"]["torch"] == importlib.metadata.version("torch")
    assert {"cpu", "cores", "memory_gib", "accelerator"} <= set(record["machine"])
    assert record["started"].endswith("+00:00")
    assert json.loads(json.dumps(record)) == record


def test_a_module_is_named_as_it_is_called(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(tool.__file__), "of-the-process"])
    for arguments, said in ((["a b"], "'a b'"), ([], ""), (None, "of-the-process")):
        command = tool.module_command("package.tool", arguments)
        assert tool.provenance(command)["command"] == (
            f"python -m package.tool {said}".strip()
        )


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a repository")
def test_the_commit_is_the_repositorys() -> None:
    head = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    done = subprocess.run(head, capture_output=True, text=True, check=True)
    record = tool.provenance()
    assert record["commit"] == done.stdout.strip()
    assert isinstance(record["uncommitted_changes"], bool)


def test_code_that_was_changed_is_said_and_results_are_not(
    monkeypatch, tmp_path
) -> None:
    result = tmp_path / "benchmark/serving/results/serving.json"
    code = tmp_path / "code.py"
    result.parent.mkdir(parents=True)
    result.write_text("{}")
    code.write_text("")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "test: all"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(tool, "ROOT", tmp_path.resolve())
    assert tool.provenance()["uncommitted_changes"] is False
    result.write_text("{} ")
    (result.parent / "new.json").write_text("{}")
    assert tool.provenance()["uncommitted_changes"] is False
    code.write_text("changed")
    assert tool.provenance()["uncommitted_changes"] is True


def test_a_copy_within_someone_elses_repository_has_no_commit(monkeypatch) -> None:
    # As site-packages of a .venv in a project of one's own.
    monkeypatch.setattr(tool, "ROOT", ROOT / "python")
    record = tool.provenance()
    assert record["commit"] is None
    assert record["uncommitted_changes"] is None


def test_without_git_the_commit_is_none(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    record = tool.provenance()
    assert record["commit"] is None
    assert record["uncommitted_changes"] is None


def test_a_package_that_is_not_installed_has_no_version(monkeypatch) -> None:
    monkeypatch.setattr(tool, "PACKAGES", ("torch", "no-such-package"))
    versions = tool.provenance()["versions"]
    assert versions["no-such-package"] is None
    assert versions["torch"]
