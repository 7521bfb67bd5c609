"""What the draft takes in memory: shared weights count for the target only."""

import types

import torch

from sglang_tetris.adapter.memory import draft_memory


class Pool:
    """Two layers of a key and a value buffer, 10 slots."""

    start_layer, layer_num, size = 0, 2, 10

    def __init__(self, width: int) -> None:
        self._keys = [torch.zeros(self.size, width) for _ in range(self.layer_num)]
        self._values = [torch.zeros(self.size, width) for _ in range(self.layer_num)]

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self._keys[layer]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self._values[layer]


class LatentPool(Pool):
    """The values are a part of what the keys hold, as with latent attention."""

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self._keys[layer][:, :1]


def runner(model: torch.nn.Module, pool: Pool) -> types.SimpleNamespace:
    return types.SimpleNamespace(model=model, token_to_kv_pool=pool)


def test_only_what_is_the_drafts_own_counts() -> None:
    target = torch.nn.ModuleDict({"embed": torch.nn.Embedding(32, 4)})
    draft = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(32, 4), "head": torch.nn.Linear(4, 8, bias=False)}
    )
    draft["embed"].weight = target["embed"].weight
    found = draft_memory(runner(target, Pool(8)), runner(draft, Pool(2)), 0)
    assert found["weight_bytes"] == 4 * 8 * 4
    assert found["kv_bytes"] == 2 * 2 * 10 * 2 * 4
    # The target keeps 2 layers x (key, value) x 8 floats of a token.
    assert found["target_tokens"] == (128 + 320) // (2 * 2 * 8 * 4)


def test_a_cut_head_and_latent_pools() -> None:
    target = torch.nn.ModuleDict({"head": torch.nn.Linear(4, 32, bias=False)})
    draft = torch.nn.ModuleDict({"head": torch.nn.Linear(4, 32, bias=False)})
    del draft["head"].weight
    draft["head"].weight = target["head"].weight.detach()[:8].clone()
    found = draft_memory(runner(target, LatentPool(8)), runner(draft, LatentPool(2)), 0)
    assert found["weight_bytes"] == 8 * 4 * 4
    assert found["kv_bytes"] == 2 * 10 * 2 * 4
