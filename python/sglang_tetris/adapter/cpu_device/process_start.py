"""Start a server's processes as copies of the launcher.

SGLang spawns them, and each imports SGLang and all its packages again: on two cores
two fifths of the time that a start takes (`benchmark/serving/start_up.py`). SGLang's
own launcher holds nothing but these imports by then, so its children can be forked from
it. A program that uses `sglang.Engine` may hold threads and locks of its own: there
SGLang's choice stays.
"""

import gc
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

# "fork", the default, or "spawn" for SGLang's own way.
START_METHOD = "SGLANG_TETRIS_START_METHOD"
_METHODS = ("fork", "spawn")

# What `python -m` runs, and the installed script that does the same.
_SERVER_MODULES = ("sglang.launch_server", "sglang.cli.main")
_SERVER_SCRIPT = "sglang"


def choose_start_method(_: Any, server_args: Any) -> None:
    """Fork what SGLang's launcher starts from here on, where that is safe.

    An after-hook of the function in which SGLang sets "spawn".

    Raises:
        SystemExit: the user chose a method that is not one of the two.
    """
    if not _is_server_program():
        return
    method = os.environ.get(START_METHOD, _METHODS[0])
    if method not in _METHODS:
        choices = " or ".join(_METHODS)
        raise SystemExit(f"sglang: error: {START_METHOD}={method}: choose {choices}")
    if method == "spawn" or not _is_safe(server_args):
        return
    os.register_at_fork(after_in_child=_undo_inherited_settings)
    # A collection writes to every object it looks at, which would copy every page.
    gc.freeze()
    multiprocessing.set_start_method("fork", force=True)


def _is_safe(server_args: Any) -> bool:
    return (
        # A lock that another thread holds would stay locked in the child for ever.
        threading.active_count() == 1
        # SGLang binds a spawned process by starting it through numactl.
        and server_args.numa_node is None
    )


def _is_server_program() -> bool:
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return main.__spec__.name in _SERVER_MODULES
    return Path(getattr(main, "__file__", None) or "").name == _SERVER_SCRIPT


def _undo_inherited_settings() -> None:
    """Leave a child what a spawned process has: default signals, and "spawn"."""
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    # The processes that start processes of their own have threads by then.
    multiprocessing.set_start_method("spawn", force=True)
