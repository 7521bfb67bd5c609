"""A round without drafts has the plan that the core would build for it."""

import dataclasses

import pytest
import torch

from sglang_tetris.adapter.undrafted import (
    accept_anchors,
    anchor_plan,
    no_drafts,
    none_kept,
)
from sglang_tetris.core import build_verify_plan, match_tree


@pytest.mark.parametrize("bs", [1, 3, 17])
def test_it_is_the_plan_of_trees_without_a_node(bs: int) -> None:
    device = torch.device("cpu")
    # Twice: what is kept from one round to the next is not the requests' own.
    for seed in range(2):
        drawn = torch.Generator().manual_seed(seed)
        anchors = torch.randint(100, (bs,), generator=drawn)
        prefix_lens = torch.randint(1000, (bs,), generator=drawn)
        found = anchor_plan(anchors, prefix_lens)
        wanted = build_verify_plan(
            no_drafts(bs, device),
            none_kept(bs, device),
            anchors=anchors,
            prefix_lens=prefix_lens,
        )
        for field in dataclasses.fields(wanted):
            value = getattr(wanted, field.name)
            if isinstance(value, torch.Tensor):
                assert torch.equal(getattr(found, field.name), value), field.name
            else:
                assert getattr(found, field.name) == value
        found.validate()


@pytest.mark.parametrize("bs", [1, 3])
def test_it_emits_what_match_tree_would(bs: int) -> None:
    plan = anchor_plan(torch.arange(bs), torch.arange(bs) + 7)
    tokens = 100 + torch.arange(bs)
    found, wanted = accept_anchors(plan, tokens), match_tree(plan, tokens)
    for field in dataclasses.fields(wanted):
        value = getattr(wanted, field.name)
        assert torch.equal(getattr(found, field.name), value), field.name
        assert getattr(found, field.name).dtype == value.dtype
