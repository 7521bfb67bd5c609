"""SGLang's sampled verification of an EAGLE tree, in torch.

Without it stock EAGLE cannot sample on this device. At a node the children are tried
in order with one coin: child i is taken with the target's own probability p_i, and
when none is, the token is drawn from the target's distribution without the children
that were refused. The output then follows the target whatever the draft proposed.
"""

import torch


def tree_speculative_sampling(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Fill ``predicts``, ``accept_index`` and ``accept_token_num`` in place.

    The names are those of the SGLang operator it stands in for; ``draft_probs`` is
    all zeros there (scratch) and stays unused.
    """
    bs = candidates.shape[0]
    request = torch.arange(bs)
    node = torch.zeros(bs, dtype=torch.int64)
    row = retrive_index[:, 0].to(torch.int64)
    count = torch.zeros(bs, dtype=torch.int64)
    accept_index[:, 0] = row.to(accept_index.dtype)
    probs = target_probs[request, node].clone()
    going = torch.ones(bs, dtype=torch.bool)
    for level in range(1, accept_index.shape[1]):
        child, probs = _choose_child(
            node, going, probs, candidates, retrive_next_token, retrive_next_sibling,
            uniform_samples, threshold_single, threshold_acc,
        )  # fmt: skip
        going &= child >= 0
        if not going.any():
            break
        r, taken = request[going], child[going]
        predicts[row[going]] = candidates[r, taken].to(predicts.dtype)
        node[going] = taken
        row[going] = retrive_index[r, taken].to(torch.int64)
        accept_index[r, level] = row[going].to(accept_index.dtype)
        probs[going] = target_probs[r, taken]
        count += going
    predicts[row] = _draw(probs, uniform_samples_for_final_sampling).to(predicts.dtype)
    accept_token_num.copy_(count)


def _choose_child(
    node: torch.Tensor,
    going: torch.Tensor,
    probs: torch.Tensor,
    candidates: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    coins: torch.Tensor,
    threshold_single: float,
    threshold_acc: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The child taken (-1: none), and ``probs`` without the children refused."""
    request = torch.arange(node.shape[0])
    coin = coins[request, node]
    mass = torch.zeros_like(coin)
    taken = torch.full_like(node, -1)
    child = torch.where(going, next_token[request, node], -1)
    while bool((child >= 0).any()):
        tried = child >= 0
        safe = child.clamp(min=0)
        token = candidates[request, safe].to(torch.int64)
        p = probs[request, token].where(tried, torch.zeros_like(coin))
        mass += p
        hit = tried & ((coin < mass / threshold_acc) | (p >= threshold_single))
        taken = torch.where(hit, child, taken)
        refused = tried & ~hit
        probs[request[refused], token[refused]] = 0.0
        child = torch.where(refused, next_sibling[request, safe], -1)
    return taken, probs


def _draw(weights: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """One index per row, in proportion to its weights, by inversion."""
    sums = weights.cumsum(dim=-1)
    below = sums <= (coins * sums[:, -1]).unsqueeze(-1)
    # Rounding may leave every sum at or below the coin: take the last that has weight.
    last = (weights > 0).int().cumsum(dim=-1).argmax(dim=-1)
    return torch.minimum(below.sum(dim=-1), last)
