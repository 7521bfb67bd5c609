"""Server arguments and thread settings that a plain CPU needs.

Defaults only: a flag or an environment variable that the user set wins.
"""

import os

from sglang_tetris.adapter.cpu_device.names import ATTENTION_BACKEND

# SGLang resolves an unset attention backend on device "cpu" to one of these before
# it asks the platform. The first needs a kernel library that is not in the wheels.
_IN_TREE_CPU_BACKENDS = ("intel_amx",)
_IN_TREE_ARM_BACKENDS = ("torch_native",)


def apply_defaults(server_args: object) -> None:
    """Fill SGLang's server arguments for this device (called by SGLang)."""
    in_tree = _IN_TREE_CPU_BACKENDS
    if os.uname().machine in ("aarch64", "arm64"):
        in_tree += _IN_TREE_ARM_BACKENDS
    if server_args.attention_backend in (None, *in_tree):
        server_args.attention_backend = ATTENTION_BACKEND
    # An idle scheduler otherwise spins on a whole core. The poll wakes at once.
    server_args.sleep_on_idle = True
