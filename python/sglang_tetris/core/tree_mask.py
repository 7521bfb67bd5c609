"""The attention mask among the rows of one request: ancestors and oneself.

    attend(i, j)  =  j is i, or j is an ancestor of i

so the anchor (place 0) is seen by every row, siblings never see each other, and in a
chain the mask is the lower triangle. `VerifyPlan.custom_mask` puts the prefix ahead.
"""

import torch


def reachable_torch(parent_at: torch.Tensor, max_depth: int) -> torch.Tensor:
    """Return `[bs, W, W]` bool, True where the second place is on the first's path.

    parent_at `[bs, W]` int64 holds places, -1 at the anchor and where there is no row.
    By doubling: after k rounds a row knows its nearest 2^k - 1 ancestors.
    """
    width = parent_at.shape[1]
    reach = torch.eye(width, dtype=torch.bool, device=parent_at.device)
    reach = reach.expand(parent_at.shape[0], width, width)
    jump = parent_at.clamp(min=0)
    for _ in range(max_depth.bit_length()):
        reach = reach | reach.gather(1, jump[:, :, None].expand_as(reach))
        jump = jump.gather(1, jump)
    return reach


def flatten_mask_torch(
    reach: torch.Tensor, verify_lens: torch.Tensor, num_elements: int
) -> torch.Tensor:
    """Lay the requests' [verify_len, verify_len] corners of `reach` end to end.

    verify_lens `[bs]` int64, bs > 0. Padded with False or cut to `num_elements`.
    """
    ends = (verify_lens * verify_lens).cumsum(0)
    element = torch.arange(num_elements, device=reach.device)
    request = torch.searchsorted(ends, element, right=True)
    live = request < reach.shape[0]
    request = request.clamp(max=reach.shape[0] - 1)
    side = verify_lens[request]
    inner = torch.where(live, element - (ends - verify_lens * verify_lens)[request], 0)
    # On an accelerator lengths are not checked: stay inside the table in any case.
    row = (inner // side).clamp(max=reach.shape[1] - 1)
    column = (inner % side).clamp(max=reach.shape[1] - 1)
    return live & reach[request, row, column]
