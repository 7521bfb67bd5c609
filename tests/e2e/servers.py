"""Start a real SGLang server on loopback, talk to it, and stop all it started."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

READY_TIMEOUT_S = 420.0
# Loopback only, float32 for comparisons, a pool that a small machine can hold.
BASE_FLAGS = (
    *("--host", "127.0.0.1"),
    *("--dtype", "float32"),
    *("--max-total-tokens", "20000"),
    *("--mem-fraction-static", "0.6"),
)


class ServerFailedError(RuntimeError):
    """The server ended, or was not ready in time; the message ends with its log."""


class Server:
    """A running server: ``generate``, ``post``, ``get``, ``server_info``."""

    def __init__(self, process: subprocess.Popen, port: int, log_path: Path) -> None:
        self.process = process
        self.port = port
        self.log_path = log_path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def get(self, path: str, *, timeout_s: float = 60.0) -> dict:
        return _request(f"{self.url}{path}", None, timeout_s)

    def post(self, path: str, body: dict, *, timeout_s: float = 300.0) -> dict | list:
        return _request(f"{self.url}{path}", body, timeout_s)

    def generate(
        self,
        input_ids: Sequence[Sequence[int]],
        *,
        timeout_s: float = 300.0,
        request: dict | None = None,
        **sampling_params: object,
    ) -> list[dict]:
        """One ``/generate`` call for a batch; the replies, in order.

        ``request`` holds further fields of the request, beside the sampling
        parameters. Generation runs to ``max_new_tokens`` (16 unless given).
        """
        params = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
        body = {"input_ids": [list(ids) for ids in input_ids]} | (request or {})
        body["sampling_params"] = params | sampling_params
        return self.post("/generate", body, timeout_s=timeout_s)

    def server_info(self) -> dict:
        return self.get("/server_info")

    def flush_cache(self) -> None:
        """Drop the prefix cache, so that a test starts from an empty one."""
        request = urllib.request.Request(f"{self.url}/flush_cache", method="POST")
        urllib.request.urlopen(request, timeout=60).close()


@contextmanager
def running_server(
    model_path: Path | str,
    flags: Sequence[str] = (),
    *,
    log_dir: Path,
    env: dict[str, str] | None = None,
    ready_timeout_s: float = READY_TIMEOUT_S,
) -> Iterator[Server]:
    """A server for ``model_path`` with ``BASE_FLAGS`` and ``flags``, until the end.

    ``flags`` come last and win. Raises ``ServerFailedError`` when it does not start.
    """
    server = start_server(
        model_path, flags, log_dir=log_dir, env=env, ready_timeout_s=ready_timeout_s
    )
    try:
        yield server
    finally:
        stop_server(server)


def start_server(
    model_path: Path | str,
    flags: Sequence[str] = (),
    *,
    log_dir: Path,
    env: dict[str, str] | None = None,
    ready_timeout_s: float = READY_TIMEOUT_S,
) -> Server:
    """As ``running_server``, for callers that end it with ``stop_server``."""
    port = free_port()
    log_path = log_dir / f"server-{port}.log"
    command = [
        # `python -m sglang.launch_server` is what demo, README and benchmark run.
        *(str(Path(sys.executable).with_name("sglang")), "serve"),
        *("--model-path", str(model_path)),
        *("--port", str(port)),
        *BASE_FLAGS,
        *flags,
    ]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | (env or {}),
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    server = Server(process, port, log_path)
    try:
        _wait_until_ready(server, ready_timeout_s)
    except BaseException:
        stop_server(server)
        raise
    return server


def _end_with_parent() -> None:
    """Have Linux end this process when the test run is killed outright."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def stop_server(server: Server) -> None:
    """End the server and every process that it started."""
    processes = []
    try:
        parent = psutil.Process(server.process.pid)
        processes = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        pass
    for process in processes:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=10)
    for process in alive:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=10)
    server.process.wait(timeout=10)


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _signal(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _wait_until_ready(server: Server, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise ServerFailedError(
                f"server ended with status {server.process.returncode}\n"
                f"{server.log()[-4000:]}"
            )
        # The line follows SGLang's own warm-up request.
        if "The server is fired up" in server.log():
            return
        time.sleep(0.3)
    raise ServerFailedError(
        f"server not ready after {timeout_s:.0f} s\n{server.log()[-4000:]}"
    )


def _request(url: str, body: dict | None, timeout_s: float) -> dict | list:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url, data=data, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            return json.loads(reply.read() or b"null")
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url}: {error.code} {error.read().decode()}") from error
