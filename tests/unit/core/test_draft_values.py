"""Values of sampled positions: functions of the recorded law alone."""

import numpy as np
import pytest
import torch

from sglang_tetris.core import DraftTrees, max_draft_prob, sum_square

RULES = [max_draft_prob, sum_square]


def test_by_hand():
    laws = torch.tensor([[[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]]])
    assert max_draft_prob(laws).tolist() == [[0.5, 1.0]]
    assert sum_square(laws).tolist() == [[0.375, 1.0]]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_they_are_accept_probs(rule, dtype):
    rng = np.random.default_rng(0)
    laws = torch.from_numpy(rng.dirichlet(np.full(50, 0.02), (20, 4))).to(dtype)
    # A law that rounding has pushed past 1 may not give a value past 1.
    laws[0, 0] = 0
    laws[0, 0, 3] = 1 + 2.0**-20
    values = rule(laws)
    assert values.shape == (20, 4)
    assert values.dtype == torch.float32
    DraftTrees(
        tokens=torch.zeros(20, 4, dtype=torch.int64),
        parents=torch.arange(-1, 3).repeat(20, 1),
        accept_probs=values,
        num_nodes=torch.full((20,), 4),
    )
    # Tokens may change places, and others of probability 0 join.
    other = torch.nn.functional.pad(laws.flip(-1), (2, 5))
    assert torch.allclose(rule(other), values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5)])
def test_empty(rule, shape):
    assert rule(torch.zeros(shape)).shape == shape[:2]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("laws", "value"),
    [
        (torch.zeros(2, 3), "[2, 3]"),
        (torch.zeros(2, 3, 4).bfloat16(), "bfloat16"),
        (torch.zeros(2, 3, 0), "[2, 3, 0]"),
        ([[0.5]], "[[0.5]]"),
    ],
)
def test_bad_laws(rule, laws, value):
    with pytest.raises(ValueError, match=r"^draft_probs must ") as error:
        rule(laws)
    assert value in str(error.value)
