"""Environment defaults for the processes of a server on a small CPU machine.

Only what the user left unset; nothing here imports torch or sglang.
"""

from collections.abc import MutableMapping

_DEFAULTS = {
    # SGLang compiles a few helpers with inductor on their first use: 10 to 20 s in
    # the first request, and it needs a C++ compiler. They are small; eager is as fast.
    "TORCHDYNAMO_DISABLE": "1",
    # OpenMP threads otherwise spin for milliseconds after each parallel operation of
    # torch, on cores that the kernels' own threads and the other processes need.
    "OMP_WAIT_POLICY": "PASSIVE",
}


def set_defaults(environment: MutableMapping[str, str]) -> None:
    """Fill in what is unset in ``environment`` (usually ``os.environ``)."""
    for name, value in _DEFAULTS.items():
        environment.setdefault(name, value)
