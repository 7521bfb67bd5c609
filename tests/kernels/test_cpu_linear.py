"""Packed linear layers: right to float32, and the same bits in every batch."""

import os
import types
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod

from sglang_tetris.adapter.cpu_device import linear

pytestmark = pytest.mark.skipif(not linear.is_available(), reason="needs a C compiler")
# Columns and inputs that do and do not fill a panel, and more rows than one block.
SHAPES = [(960, 576), (49, 64), (16, 100), (130, 33)]
ROWS = (1, 2, 3, 4, 5, 6, 7, 13, 96, 97, 130)


def random_weight(columns: int, k: int, *, bfloat16: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(columns * k)
    weight = torch.randn(columns, k, generator=generator)
    return weight.bfloat16().float() if bfloat16 else weight


@pytest.mark.parametrize("bfloat16", [True, False])
@pytest.mark.parametrize(("columns", "k"), SHAPES)
def test_rows_are_right_and_do_not_depend_on_the_batch(
    columns: int, k: int, bfloat16: bool
) -> None:
    weight = random_weight(columns, k, bfloat16=bfloat16)
    packed = linear.pack(weight)
    assert packed.panels.dtype == (torch.bfloat16 if bfloat16 else torch.float32)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(ROWS), k, generator=generator)
    bias = torch.randn(columns, generator=generator)
    whole = packed.apply(x, bias)
    expected = x.double() @ weight.double().T + bias
    torch.testing.assert_close(whole.double(), expected, atol=3e-4, rtol=0.0)
    for rows in ROWS:
        assert torch.equal(packed.apply(x[:rows], bias), whole[:rows])
        assert torch.equal(packed.apply(x[-rows:], bias), whole[-rows:])


def test_bfloat16_rows_round_once() -> None:
    weight = random_weight(64, 128, bfloat16=True).bfloat16()
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    got = linear.pack(weight).apply(x)
    assert got.dtype == torch.bfloat16
    exact = linear.pack(weight.float()).apply(x.float())
    assert torch.equal(got, exact.bfloat16())


def test_leading_dimensions_and_strides() -> None:
    weight = random_weight(40, 24, bfloat16=False)
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(2))
    strided = x[:, ::2]
    got = linear.packed_linear(strided, weight)
    torch.testing.assert_close(got, strided @ weight.T, atol=1e-5, rtol=0.0)
    batched = linear.packed_linear(x.view(3, 2, 24), weight)
    assert batched.shape == (3, 2, 40)
    assert linear.packed_linear(x[:0, :24], weight).shape == (0, 40)


def test_a_changed_weight_is_packed_again() -> None:
    weight = random_weight(32, 16, bfloat16=False)
    x = torch.ones(1, 16)
    before = linear.packed_linear(x, weight)
    assert linear.packed_weight(weight) is linear.packed_weight(weight)
    weight.mul_(2.0)
    assert torch.equal(linear.packed_linear(x, weight), before * 2.0)


def test_other_dtypes_are_left_to_torch() -> None:
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))
    x = torch.ones(2, 16, dtype=torch.float64)
    got = linear.packed_linear(x, weight.double())
    assert torch.equal(got, torch.nn.functional.linear(x, weight.double()))


def test_use_packed_weights_covers_plain_layers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 8))
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = model(x)
        linear.use_packed_weights(model)
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=0.0)


@pytest.fixture
def four_threads():
    """Kernels on four threads, so that loops are shared on a small machine too."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_callers_share_the_threads(four_threads: None) -> None:
    """Results are the same however many call at once, and whoever helps."""
    packed = linear.pack(random_weight(960, 64, bfloat16=True))
    inputs = [
        torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
        for rows in (1, 3, 17, 100)
    ]
    wanted = [packed.apply(x) for x in inputs]

    def repeat(which: int) -> bool:
        torch.set_num_threads(4)  # a new thread starts with the default
        got = (packed.apply(inputs[which]) for _ in range(200))
        return all(torch.equal(out, wanted[which]) for out in got)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(repeat, (0, 1, 2, 3)))


def _num_threads() -> int:
    return psutil.Process().num_threads()


def test_a_forked_child_starts_its_own_threads(four_threads: None) -> None:
    packed = linear.pack(random_weight(960, 64, bfloat16=True))
    x = torch.ones(9, 64)
    wanted = packed.apply(x)
    child = os.fork()
    if child == 0:
        same = all(torch.equal(packed.apply(x), wanted) for _ in range(50))
        # A fork leaves the child one thread; three helpers must have joined it.
        os._exit(0 if same and _num_threads() == 4 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("kind", [torch.nn.Parameter, torch.Tensor.clone])
def test_a_head_of_either_kind_is_packed(kind) -> None:
    """SGLang cuts a draft's head to the hot tokens, which leaves a plain tensor."""
    weight = random_weight(48, 16, bfloat16=False)
    head = types.SimpleNamespace(
        weight=kind(weight), quant_method=UnquantizedEmbeddingMethod()
    )
    processor = types.SimpleNamespace(use_fp32_lm_head=False)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        got = linear.compute_lm_head(pytest.fail, processor, x, head)
    torch.testing.assert_close(got, x @ weight.T, atol=1e-5, rtol=0.0)
