"""The MHA key/value pool without Triton: the same buffers, moved on the host."""

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, move_kv_cache_native

from sglang_tetris.adapter.attention import cpu_native


class CpuMHATokenToKVPool(MHATokenToKVPool):
    """``MHATokenToKVPool`` whose slot copies need no device kernel."""

    def _init_kv_copy_and_warmup(self) -> None:
        # The base class compiles a Triton copy here.
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        if cpu_native.is_available():
            caches = [*self.k_buffer, *self.v_buffer]
            cpu_native.move_slots(caches, _flat(tgt_loc), _flat(src_loc))
        else:
            move_kv_cache_native(self.k_buffer, self.v_buffer, tgt_loc, src_loc)


def _flat(slots: torch.Tensor) -> torch.Tensor:
    return slots.reshape(-1).to(torch.int64)
