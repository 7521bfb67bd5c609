"""Pearson's chi-square test of drawn tokens against the law they should have."""

import torch
from scipy.stats import chi2


def p_value(counts: torch.Tensor, law: torch.Tensor) -> float:
    """How likely counts at least so far off are; float64 counts, one per cell.

    Cells of an expected count below 5 are taken together. 0 where something was drawn
    that has no chance.
    """
    expected = law.double() * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    likely = expected >= 5
    cells = torch.cat([counts[likely], counts[~likely].sum()[None]])
    wanted = torch.cat([expected[likely], expected[~likely].sum()[None]])
    if wanted[-1] == 0:
        cells, wanted = cells[:-1], wanted[:-1]
    statistic = float(((cells - wanted) ** 2 / wanted).sum())
    return float(chi2.sf(statistic, max(len(cells) - 1, 1)))
