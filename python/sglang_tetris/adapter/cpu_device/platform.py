"""A plain CPU as an SGLang device: no CUDA, no Triton, no CPU build of sgl_kernel.

The in-tree CPU path needs a kernel library that the wheels do not carry. This
platform presents the same ``cpu`` torch device as an out-of-tree one, so that
SGLang takes its torch-native paths, and supplies the attention backend and KV pool
that path lacks. Everything here is a declaration; the work is in the modules that
it names.
"""

from collections.abc import Callable

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_tetris.adapter.cpu_device.names import ATTENTION_BACKEND

# Under which SGLang's fused operators find this device's forwards.
FUSED_OP_KEY = "tetris_cpu"

# Speculative algorithms whose workers run on this device. The name of a registered
# out-of-tree algorithm is accepted as well: its own options decide.
_UNSUPPORTED_ALGORITHMS = frozenset({"DFLASH", "DSPARK", "UNO"})


class TetrisCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """The plain-CPU platform."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:
        # SGLang compares the device with strings, so not a torch.device.
        return "cpu"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm not in _UNSUPPORTED_ALGORITHMS

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_speculative_cache_locs_fn(self) -> Callable[..., object]:
        from sglang_tetris.adapter.cpu_device.index_ops import assign_extend_cache_locs

        return assign_extend_cache_locs

    def get_compile_backend(self, mode: str | None = None) -> str:
        # Nothing may need a C++ compiler.
        return "eager"

    def get_dispatch_key_name(self) -> str:
        return FUSED_OP_KEY

    def post_load_model(self, model: torch.nn.Module) -> None:
        from sglang_tetris.adapter.cpu_device.linear import use_packed_weights

        use_packed_weights(model)

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        if kind != "mha":
            return None
        from sglang_tetris.adapter.cpu_device.kv_pool import CpuMHATokenToKVPool

        return CpuMHATokenToKVPool

    def apply_server_args_defaults(self, server_args: object) -> None:
        from sglang_tetris.adapter.cpu_device.defaults import apply_defaults

        apply_defaults(server_args)
