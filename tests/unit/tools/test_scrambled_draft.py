"""A scrambled draft has the same tensors, in another order, once and for all."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_tetris.tools.scrambled_draft import WEIGHTS, scrambled_copy


def draft(tmp_path, **weights):
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file(weights, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize(
    ("name", "axis"), [("fc.weight", 0), ("model.embed_tokens.weight", 1)]
)
def test_only_the_order_of_channels_differs(tmp_path, name: str, axis: int) -> None:
    given = {name: torch.arange(48.0).view(6, 8), "other": torch.ones(2)}
    copy = scrambled_copy(draft(tmp_path, **given))
    found = load_file(copy / WEIGHTS)
    assert torch.equal(found["other"], given["other"])
    assert not torch.equal(found[name], given[name])
    sums = found[name].sum(1 - axis).sort().values
    assert torch.equal(sums, given[name].sum(1 - axis).sort().values)
    assert (copy / "config.json").exists()
    before = (copy / WEIGHTS).stat().st_mtime_ns
    assert scrambled_copy(tmp_path / "draft") == copy
    assert (copy / WEIGHTS).stat().st_mtime_ns == before


def test_a_draft_without_such_tensors_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"draft has none of the tensors fc.weight"):
        scrambled_copy(draft(tmp_path, head=torch.ones(2)))
