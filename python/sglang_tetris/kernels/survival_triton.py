"""`path_survival` in Triton: one program a request, no scratch memory, no wait."""

import torch
import triton
import triton.language as tl

from sglang_tetris.core import DraftTrees
from sglang_tetris.kernels.tree_rows import (
    launch_shape,
    load_parents,
    node_depths,
    row_survival,
)


def path_survival(trees: DraftTrees) -> torch.Tensor:
    """`core.path_survival` on a GPU, with the same bits."""
    survival = torch.empty_like(
        trees.accept_probs, memory_format=torch.contiguous_format
    )
    if survival.numel() == 0:
        return survival
    with torch.cuda.device_of(survival):
        _survival_kernel[(trees.batch_size,)](
            trees.parents.contiguous(),
            trees.accept_probs.contiguous(),
            trees.num_nodes.contiguous(),
            survival,
            trees.max_nodes,
            **launch_shape(trees.max_nodes),
        )
    return survival


@triton.jit(do_not_specialize=["max_nodes"])
def _survival_kernel(
    parents_ref,
    probs_ref,
    num_nodes_ref,
    survival_ref,
    max_nodes,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    is_node, parents = load_parents(
        parents_ref, num_nodes_ref, request, max_nodes, BLOCK
    )
    place = tl.arange(0, BLOCK)
    at = request * max_nodes + place
    probs = tl.load(probs_ref + at, mask=is_node, other=0.0)
    depths = node_depths(parents, BLOCK)
    survival = row_survival(parents, probs, tl.max(depths, 0))
    tl.store(survival_ref + at, survival, mask=place < max_nodes)
