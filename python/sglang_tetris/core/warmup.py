"""Runs every operation of the core once, so that a server's first request does not."""

import torch

from sglang_tetris.core.accept import match_tree
from sglang_tetris.core.allocator import select_draft_tokens
from sglang_tetris.core.backend import cpu_backend
from sglang_tetris.core.calibration import Calibrator
from sglang_tetris.core.layout import build_verify_plan
from sglang_tetris.core.node_labels import labelled_nodes
from sglang_tetris.core.survival import path_survival
from sglang_tetris.core.types import DraftTrees


def warm_up(device: torch.device | str = "cpu") -> str:
    """Load and compile whatever the core's operations need on `device`.

    Returns what serves CPU tensors, "numba" or "torch", for the server's log. The
    compiled loops have one signature each, so no later call compiles anything.
    """
    ints = torch.zeros(2, 3, dtype=torch.int64, device=device)
    trees = DraftTrees(
        tokens=ints,
        parents=ints - 1,
        accept_probs=torch.ones(2, 3, device=device),
        num_nodes=ints[:, 0] + 3,
    )
    path_survival(trees)
    for caps, weights in ((None, None), (2, torch.ones(2, device=device))):
        allocation = select_draft_tokens(
            trees, draft_budget=3, max_drafts=caps, weights=weights
        )
        plan = build_verify_plan(
            trees, allocation, anchors=ints[:, 0], prefix_lens=ints[:, 0] + 1
        )
        plan.custom_mask()
        accepted = match_tree(plan, plan.input_ids)
    calibrator = Calibrator()
    calibrator.calibrate_trees(trees, ints[:, 0])
    labels = labelled_nodes(trees, plan, accepted)
    calibrator.update(*labels[:3], labels.requests, labels.correct)
    return cpu_backend()
