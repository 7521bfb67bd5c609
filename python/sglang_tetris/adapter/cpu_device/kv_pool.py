"""The MHA key/value pool without Triton: the same buffers, moved by torch."""

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, move_kv_cache_native


class CpuMHATokenToKVPool(MHATokenToKVPool):
    """``MHATokenToKVPool`` whose slot copies need no device kernel."""

    def _init_kv_copy_and_warmup(self) -> None:
        # The base class compiles a Triton copy here.
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        move_kv_cache_native(self.k_buffer, self.v_buffer, tgt_loc, src_loc)
