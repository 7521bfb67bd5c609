"""Which SGLang function each host version replaces, and a check that it does."""

import importlib

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_tetris.adapter.cpu_device import (
    index_ops,
    sampling_ops,
    tree_ops,
    tree_sampling,
)
from sglang_tetris.adapter.cpu_device.draft_backends import (
    create_decode_backend,
    create_draft_extend_backend,
)
from sglang_tetris.adapter.cpu_device.linear import compute_lm_head
from sglang_tetris.adapter.cpu_device.process_start import choose_start_method

_OPS = "sglang.kernels.ops"
_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"


def _qlen_only_mask_mode() -> object:
    """Tree masks are verify rows by verify rows here; see ``attention.cpu``."""
    from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode

    return TreeMaskMode.QLEN_ONLY


def _no_batch_invariant_mode() -> None:
    """Its matrix kernels are CUDA and XPU only; see ``docs`` for what remains."""


REPLACEMENTS = {
    f"{_OPS}.speculative.cache_locs.assign_draft_cache_locs_contiguous_func": (
        index_ops.assign_draft_cache_locs_contiguous
    ),
    f"{_OPS}.speculative.cache_locs.fill_front_out_cache_loc_func": (
        index_ops.fill_front_out_cache_loc
    ),
    f"{_OPS}.speculative.eagle.fill_accept_out_cache_loc_func": (
        index_ops.fill_accept_out_cache_loc
    ),
    f"{_OPS}.speculative.eagle.fill_bonus_tokens_func": index_ops.fill_bonus_tokens,
    f"{_OPS}.speculative.gather_spec_extras.gather_spec_extras": (
        index_ops.gather_spec_extras
    ),
    f"{_OPS}.speculative.spec_tree.build_tree_kernel_efficient_func": (
        tree_ops.build_tree
    ),
    f"{_OPS}.speculative.spec_tree.verify_tree_greedy_func": (
        tree_ops.verify_tree_greedy
    ),
    f"{_OPS}.sampling.murmur_hash.murmur_hash32": sampling_ops.murmur_hash32,
    "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode": (
        _no_batch_invariant_mode
    ),
    "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func": (
        index_ops.assign_req_to_token_pool
    ),
    "sglang.srt.mem_cache.allocation.get_last_loc": index_ops.last_loc,
    "sglang.srt.speculative.eagle_utils.default_tree_mask_mode": _qlen_only_mask_mode,
}

WRAPPERS = {
    "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head": (
        compute_lm_head
    ),
    f"{_FACTORY}.create_decode_backend": create_decode_backend,
    f"{_FACTORY}.create_draft_extend_backend": create_draft_extend_backend,
}

# Called after SGLang's own function, with its result and its arguments.
FOLLOWERS = {
    "sglang.srt.entrypoints.engine._set_envs_and_config": choose_start_method,
}

# Names that SGLang binds to None where a platform has no kernel. They cannot be
# hooked: the registry would rebind every None in every module.
_VERIFY_MODULE = "sglang.srt.speculative.eagle_utils"
FILLED = {
    "top_k_renorm_prob": sampling_ops.top_k_renorm,
    "top_p_renorm_prob": sampling_ops.top_p_renorm,
    "tree_speculative_sampling_target_only": tree_sampling.tree_speculative_sampling,
}


def register_hooks() -> None:
    """Register every replacement; SGLang applies them after all plugins ran."""
    module = importlib.import_module(_VERIFY_MODULE)
    for name, function in FILLED.items():
        if getattr(module, name) is None:
            setattr(module, name, function)
    for target, function in REPLACEMENTS.items():
        HookRegistry.register(target, function, HookType.REPLACE)
    for target, function in WRAPPERS.items():
        HookRegistry.register(target, function, HookType.AROUND)
    for target, function in FOLLOWERS.items():
        HookRegistry.register(target, function, HookType.AFTER)


def unapplied_hooks() -> list[str]:
    """The targets that SGLang failed to replace: it only logs that."""
    targets = (*REPLACEMENTS, *WRAPPERS, *FOLLOWERS)
    return [target for target in targets if target not in HookRegistry._patched]
