"""A `launch_server` of one's own: started on loopback, awaited, and wholly stopped.

SGLang's server is a tree of processes. It gets a session of its own, so that Ctrl-C in
the terminal reaches only the program that started it, and that program stops the tree
by process id: first the server, which ends its own children, then whoever is left.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

READY_TIMEOUT_S = 600.0
# SGLang needs a few seconds to end its own children; then they are killed.
STOP_TIMEOUT_S = 8.0
LOG_TAIL_LINES = 20
# One line of SGLang's log holds all of its 500 settings.
LOG_LINE_CHARS = 300


class ServerError(RuntimeError):
    """The server ended or was not ready in time; the message ends with its log."""


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """A running server: `url`, `pid`, `log_path`; ended by `stop`."""

    def __init__(self, process: subprocess.Popen, port: int, log_path: Path) -> None:
        self._process = process
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = log_path

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(
        self, timeout_s: float, while_waiting: Callable[[], None] | None = None
    ) -> None:
        """Return once the server answers; calls `while_waiting` about twice a second.

        Raises:
            ServerError: it ended, or did not answer within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not self._is_ready():
            self.check_running()
            if time.monotonic() > deadline:
                self._fail(f"was not ready within {timeout_s:.0f} s")
            if while_waiting is not None:
                while_waiting()
            time.sleep(0.5)

    def check_running(self) -> None:
        """Return if the process is alive, else raise ServerError with its log's end."""
        if self._process.poll() is not None:
            self._fail(f"ended with status {self._process.returncode}")

    def _is_ready(self) -> bool:
        try:
            # SGLang answers 503 until its own warm-up request is through.
            with urllib.request.urlopen(f"{self.url}/health", timeout=30) as reply:
                ready: bool = reply.status == 200
                return ready
        except (urllib.error.URLError, OSError):
            return False

    def _fail(self, what: str) -> None:
        lines = self.log_path.read_text(errors="replace").splitlines()
        tail = "\n".join(line[:LOG_LINE_CHARS] for line in lines[-LOG_TAIL_LINES:])
        raise ServerError(f"The server {what}. End of {self.log_path}:\n{tail}")

    def processes(self) -> list[psutil.Process]:
        """Return the server and all its descendants that are alive, itself first."""
        try:
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def resident_bytes(self) -> int:
        """Return the resident memory of the whole tree, shared pages counted once
        per process."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def stop(self) -> None:
        """End the server and everything it started; safe to call twice."""
        family = self.processes()
        if self._process.poll() is None:
            self._process.terminate()
        _, alive = psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)
        # Whoever outlived the server, and what it may have started meanwhile.
        for process in [*alive, *_session_members(self.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=STOP_TIMEOUT_S)
        self._process.wait(timeout=STOP_TIMEOUT_S)


def _session_members(session_id: int) -> list[psutil.Process]:
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) == session_id:
                members.append(process)
    return members


@contextlib.contextmanager
def running_server(
    flags: Sequence[str],
    *,
    log_path: Path,
    ready_timeout_s: float = READY_TIMEOUT_S,
    while_waiting: Callable[[], None] | None = None,
) -> Iterator[ServerProcess]:
    """Yield a ready server with `flags` on a free loopback port; stop it afterwards.

    Raises:
        ServerError: it did not become ready; nothing of it is left running.
    """
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1"]
    command += ["--port", str(port), *flags]
    with running_command(
        command,
        port,
        log_path=log_path,
        ready_timeout_s=ready_timeout_s,
        while_waiting=while_waiting,
    ) as server:
        yield server


@contextlib.contextmanager
def running_command(
    command: Sequence[str],
    port: int,
    *,
    log_path: Path,
    ready_timeout_s: float = READY_TIMEOUT_S,
    while_waiting: Callable[[], None] | None = None,
) -> Iterator[ServerProcess]:
    """As `running_server`, for a whole command line that will listen on `port`."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = ServerProcess(process, port, log_path)
    try:
        server.wait_until_ready(ready_timeout_s, while_waiting)
        yield server
    finally:
        with _no_interrupt():
            server.stop()


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    # A second Ctrl-C while stopping would leave processes behind.
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread: it gets no signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def exit_on_signals() -> None:
    """Turn SIGTERM and SIGHUP into SystemExit, so that `finally` blocks run."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
