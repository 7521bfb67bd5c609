"""SGLang's EAGLE tree functions in torch, for a device without their kernels.

Each has the signature of the function it stands in for (see ``hooks``), writes the
same tensors in place and gives the same result.
"""

import torch

# sglang's TreeMaskMode.FULL_MASK: prefix columns are part of the mask.
_FULL_MASK = 0


def build_tree(
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """Links, positions and mask of the trees that ``top_scores_index`` selects.

    Node 0 is the anchor; node ``i`` is draft candidate ``top_scores_index[:, i - 1]``.
    Children of a node are linked in ascending order.
    """
    if int(tree_mask_mode) == _FULL_MASK:
        raise RuntimeError("the plain-CPU device builds QLEN_ONLY tree masks only")
    bs = seq_lens.shape[0]
    width = num_verify_tokens
    retrieve_index.copy_(torch.arange(bs * width).view(bs, width))
    parents = _parent_nodes(parent_list, top_scores_index, topk)
    _link_children(parents, retrieve_next_token, retrieve_next_sibling)

    # Row i of the mask: i itself and its ancestors; parents precede children.
    visible = torch.eye(width, dtype=torch.bool).repeat(bs, 1, 1)
    depth = torch.zeros(bs, width, dtype=torch.int64)
    request = torch.arange(bs)
    for node in range(1, width):
        parent = parents[:, node - 1].clamp(min=0)
        visible[:, node] |= visible[request, parent]
        depth[:, node] = depth[request, parent] + 1
    tree_mask[: bs * width * width] = visible.view(-1)
    positions.copy_((depth + seq_lens.unsqueeze(1)).view(-1))


def _parent_nodes(
    parent_list: torch.Tensor, selected: torch.Tensor, topk: int
) -> torch.Tensor:
    """``[bs, nodes]``: the parent of node ``i + 1``; -1 where it was not selected."""
    group = selected // topk
    if parent_list.shape[1] == 0:
        return torch.zeros_like(group)
    candidate = parent_list.gather(1, group.clamp(max=parent_list.shape[1] - 1))
    same = selected.unsqueeze(1) == candidate.unsqueeze(2)
    found = torch.where(same.any(dim=2), same.int().argmax(dim=2) + 1, -1)
    return torch.where(group == 0, 0, found)


def _link_children(
    parents: torch.Tensor, next_token: torch.Tensor, next_sibling: torch.Tensor
) -> None:
    """First-child and next-sibling links from ``parents``; the rest stays -1."""
    bs, num_nodes = parents.shape
    request = torch.arange(bs)
    for node in range(num_nodes, 0, -1):
        parent = parents[:, node - 1]
        linked = parent >= 0
        rows, parent = request[linked], parent[linked]
        next_sibling[rows, node] = next_token[rows, parent]
        next_token[rows, parent] = node


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follow, from the anchor, the child that holds the target's own token."""
    bs = candidates.shape[0]
    request = torch.arange(bs)
    flat_target = target_predict.reshape(-1)
    node = torch.zeros(bs, dtype=torch.int64)
    num_accepted = torch.zeros(bs, dtype=torch.int64)
    row = retrieve_index[:, 0].to(torch.int64)
    accept_index[:, 0] = row.to(accept_index.dtype)
    going = torch.ones(bs, dtype=torch.bool)
    for level in range(1, accept_index.shape[1]):
        child = _matching_child(
            node, flat_target[row], candidates, retrieve_next_token,
            retrieve_next_sibling,
        )  # fmt: skip
        going &= child >= 0
        if not going.any():
            break
        r = request[going]
        predicts[row[going]] = flat_target[row[going]].to(predicts.dtype)
        node[going] = child[going]
        row[going] = retrieve_index[r, child[going]]
        accept_index[r, level] = row[going].to(accept_index.dtype)
        num_accepted += going
    predicts[row] = flat_target[row].to(predicts.dtype)
    accept_token_num.copy_(num_accepted)
    return predicts, accept_index, accept_token_num


def _matching_child(
    node: torch.Tensor,
    token: torch.Tensor,
    candidates: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
) -> torch.Tensor:
    """``[bs]``: the first child of ``node`` that holds ``token``, else -1."""
    request = torch.arange(node.shape[0])
    match = torch.full_like(node, -1)
    child = next_token[request, node]
    while bool((child >= 0).any()):
        safe = child.clamp(min=0)
        hit = (child >= 0) & (candidates[request, safe] == token)
        match = torch.where(hit, child, match)
        child = torch.where(hit | (child < 0), -1, next_sibling[request, safe])
    return match
