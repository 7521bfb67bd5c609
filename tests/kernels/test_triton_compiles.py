"""The Triton kernels compile for GPUs, which needs none.

The interpreter accepts much that the compiler refuses. What the compiled kernels
compute is for test_core_cuda.py.
"""

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from sglang_tetris.kernels import (  # noqa: E402
    plan_triton,
    select_triton,
    survival_triton,
)
from sglang_tetris.kernels.tree_rows import launch_shape  # noqa: E402

# The kernels' arguments that are not `*i64`: pointers to others, and integers.
TYPES = {
    "probs_ref": "*fp32",
    "weights_ref": "*fp32",
    "survival_ref": "*fp32",
    "expected_ref": "*fp32",
    "verify_lens_ref": "*i32",
    "qo_indptr_ref": "*i32",
    "keep_ref": "*i1",
    "mask_ref": "*i1",
    **dict.fromkeys(("max_nodes", "num_keys", "width"), "i32"),
    **dict.fromkeys(("num_rows", "num_elements"), "i32"),
}
NO_LIMITS = {"weights_ref": None, "caps_ref": None, "floors_ref": None}
PLAN = {"CHUNK": 1024, "WIDTH_BLOCK": 64}
BY_ROW = {
    "survival": (survival_triton._survival_kernel, {}),
    "keys": (select_triton._key_kernel, {}),
    "keys without limits": (select_triton._key_kernel, NO_LIMITS),
    "totals": (select_triton._total_kernel, {}),
    "plan": (plan_triton._plan_kernel, PLAN),
}
# compute capability, max_nodes
CASES = [(80, 63), (90, 300)]


def compiled_ptx(kernel, capability: int, num_warps: int, constants: dict) -> str:
    signature = {
        name: "constexpr" if name in constants else TYPES.get(name, "*i64")
        for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", capability, 32)
    done = triton.compile(source, target=target, options={"num_warps": num_warps})
    # ptxas accepted it as well.
    assert done.asm["cubin"]
    return done.asm["ptx"]


@pytest.mark.parametrize("name", BY_ROW)
@pytest.mark.parametrize(("capability", "max_nodes"), CASES)
def test_a_kernel_over_rows(name, capability, max_nodes):
    kernel, constants = BY_ROW[name]
    shape = launch_shape(max_nodes)
    num_warps = shape.pop("num_warps")
    ptx = compiled_ptx(kernel, capability, num_warps, {**shape, **constants})
    # Small survivals flushed to zero would differ from the CPU's.
    assert ".ftz" not in ptx


@pytest.mark.parametrize("capability", [80, 90])
def test_the_admission_kernel(capability):
    constants = {"CHUNK": select_triton.CHUNK}
    num_warps = select_triton.CHUNK_WARPS
    compiled_ptx(select_triton._admission_kernel, capability, num_warps, constants)
