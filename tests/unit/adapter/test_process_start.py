"""Which programs have their children forked, and what such a child inherits."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

# Run as a file, because a start method belongs to a whole process.
PROGRAM = """
import multiprocessing, signal, sys, threading
from types import SimpleNamespace
from sglang_tetris.adapter.cpu_device.process_start import choose_start_method

seen = []

def report(pipe):
    method = multiprocessing.get_start_method()
    default = signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL
    pipe.send((len(seen), method, default))

if __name__ == "__main__":
    signal.signal(signal.SIGQUIT, lambda *_: None)
    multiprocessing.set_start_method("spawn", force=True)
    if "thread" in sys.argv:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    node = 0 if "numa" in sys.argv else None
    choose_start_method(None, SimpleNamespace(numa_node=node))
    seen.append("only the parent saw this")
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.Process(target=report, args=(theirs,))
    child.start()
    print(*ours.recv())
    child.join()
"""
FORKED = "1 spawn True"
SPAWNED = "0 spawn True"


def run(folder: Path, name: str, *arguments: str, **environment: str) -> str:
    """Run PROGRAM as the file `name`, or as a module where that has dots."""
    program = folder / name.replace(".", "/")
    if "." in name:
        program = program.with_suffix(".py")
        program.parent.mkdir()
        # A package of this name, before the real one.
        (program.parent / "__init__.py").touch()
    program.write_text(PROGRAM)
    command = ["-m", name] if "." in name else [str(program)]
    done = subprocess.run(
        [sys.executable, *command, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={"PATH": "", **environment},
    )
    return done.stdout.strip() or done.stderr.strip()


@pytest.mark.parametrize("name", ["sglang", "sglang.launch_server"])
def test_the_launchers_children_are_copies_that_spawn_theirs(tmp_path, name):
    assert run(tmp_path, name) == FORKED


def test_a_program_that_uses_the_engine_spawns(tmp_path):
    assert run(tmp_path, "program") == SPAWNED


@pytest.mark.parametrize("reason", ["thread", "numa"])
def test_the_launcher_spawns_where_a_copy_is_not_safe(tmp_path, reason):
    assert run(tmp_path, "sglang", reason) == SPAWNED


def test_the_user_can_choose_spawn(tmp_path):
    setting = {"SGLANG_TETRIS_START_METHOD": "spawn"}
    assert run(tmp_path, "sglang", **setting) == SPAWNED


def test_an_unknown_method_is_refused_in_one_sentence(tmp_path):
    setting = {"SGLANG_TETRIS_START_METHOD": "thread"}
    assert run(tmp_path, "sglang", **setting) == (
        "sglang: error: SGLANG_TETRIS_START_METHOD=thread: choose fork or spawn"
    )
