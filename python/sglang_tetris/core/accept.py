"""Follows the target's tokens down the verified trees (`match` verification).

At each row the target has chosen its own token. Starting at the anchor, go to the
child that holds the token chosen at the current row; where there is none, that token is
the bonus token and the round ends. The draft never decides what is emitted, so any tree
and any trimming leave the output law as it is. Of equal siblings the lower node is
followed.
"""

import torch

from sglang_tetris.core.backend import loops_for
from sglang_tetris.core.errors import check_tensor
from sglang_tetris.core.types import AcceptResult, VerifyPlan


def match_tree(plan: VerifyPlan, target_tokens: torch.Tensor) -> AcceptResult:
    """Accept the drafts that agree with the target, and the bonus token after them.

    target_tokens `[T]` int64, the target's token at every row of the plan, padded rows
    included (their values are ignored). D, the width of the result less 1, is
    `plan.max_depth`. No wait on an accelerator. Raises ValueError for a wrong shape,
    dtype or device.
    """
    check_tensor(
        "target_tokens",
        target_tokens,
        "[T]",
        plan.input_ids.shape,
        torch.int64,
        plan.input_ids.device,
    )
    loops = loops_for(plan.input_ids)
    if loops is not None:
        result: AcceptResult = loops.match_tree(plan, target_tokens)
        return result
    return match_tree_torch(plan, target_tokens)


def match_tree_torch(plan: VerifyPlan, target_tokens: torch.Tensor) -> AcceptResult:
    """`match_tree` in torch operations, on any device; arguments checked."""
    bs, width = plan.retrieve_index.shape
    if bs == 0:
        none = target_tokens.new_empty(0, plan.max_depth + 1)
        return AcceptResult(
            accept_index=none.to(torch.int32),
            accept_lens=torch.empty(0, dtype=torch.int32, device=none.device),
            accept_tokens=none,
        )
    # Rows that a bound set too low has cut off are not there to be read.
    row_at = plan.retrieve_index
    row_at = torch.where(row_at < target_tokens.shape[0], row_at, -1)
    chosen_at = target_tokens[row_at.clamp(min=0)]
    parent_at = torch.where(row_at >= 0, plan.retrieve_parent, -1)
    wanted_at = chosen_at.gather(1, parent_at.clamp(min=0))
    correct = (parent_at >= 0) & (plan.input_ids[row_at.clamp(min=0)] == wanted_at)
    places = torch.arange(width, device=row_at.device)
    place = torch.zeros(bs, 1, dtype=torch.int64, device=row_at.device)
    rows, tokens = [], []
    for _ in range(plan.max_depth + 1):
        on_path = place < width
        inside = place.clamp(max=width - 1)
        rows.append(torch.where(on_path, row_at.gather(1, inside), -1))
        tokens.append(torch.where(on_path, chosen_at.gather(1, inside), -1))
        followed = correct & (parent_at == place)
        # The lowest followed child, or `width`, past the end, where there is none.
        place = torch.where(followed, places, width).amin(1, keepdim=True)
    accept_index = torch.cat(rows, 1)
    return AcceptResult(
        accept_index=accept_index.to(torch.int32),
        accept_lens=(accept_index >= 0).sum(1, dtype=torch.int32),
        accept_tokens=torch.cat(tokens, 1),
    )
