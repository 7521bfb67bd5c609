"""What the draft costs in memory, and how many of the target's tokens fit there."""

import logging
from collections.abc import Iterable
from typing import Any

import torch

logger = logging.getLogger(__name__)


def draft_memory(target: Any, draft: Any, kept_bytes: int) -> dict[str, int]:
    """Return and log the memory that only the draft needs.

    target and draft are SGLang's model runners; kept_bytes is what is kept of texts
    that were decoded without drafts.

    weight_bytes  the draft's weights without those that it shares with the target
    kv_bytes      its key/value pool
    kept_bytes    as given
    target_tokens how many tokens more the target's pool could hold in both together
    """
    target_kv = _bytes(_kv_buffers(target.token_to_kv_pool))
    weights = _storages(_tensors(draft.model))
    for shared in _storages(_tensors(target.model)):
        weights.pop(shared, None)
    weight_bytes = sum(weights.values())
    kv_bytes = _bytes(_kv_buffers(draft.token_to_kv_pool))
    per_token = target_kv / target.token_to_kv_pool.size
    target_tokens = int((weight_bytes + kv_bytes + kept_bytes) / per_token)
    logger.info(
        "TETRIS: the draft takes %.1f MiB of weights, %.1f MiB of KV and %.1f MiB of "
        "kept hidden states, which is the room of %d tokens in the target's pool.",
        weight_bytes / 2**20,
        kv_bytes / 2**20,
        kept_bytes / 2**20,
        target_tokens,
    )
    return {
        "weight_bytes": weight_bytes,
        "kv_bytes": kv_bytes,
        "kept_bytes": kept_bytes,
        "target_tokens": target_tokens,
    }


def _tensors(model: torch.nn.Module) -> Iterable[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    # A draft's shared or cut head is an attribute, not a parameter.
    for module in model.modules():
        weight = vars(module).get("weight")
        if isinstance(weight, torch.Tensor):
            yield weight


def _kv_buffers(pool: Any) -> Iterable[torch.Tensor]:
    for layer in range(pool.start_layer, pool.start_layer + pool.layer_num):
        yield pool.get_key_buffer(layer)
        yield pool.get_value_buffer(layer)


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of each storage, by address: views count once."""
    stores = (tensor.untyped_storage() for tensor in tensors)
    return {store.data_ptr(): store.nbytes() for store in stores}


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(_storages(tensors).values())
