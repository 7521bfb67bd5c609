"""The allocator's operations, on whatever device the tensors are.

Signatures, contracts and results are those of `sglang_tetris.core`; `dispatch` alone
chooses who computes. Importing this package does not import triton.
"""

from sglang_tetris.kernels.dispatch import (
    build_verify_plan,
    path_survival,
    select_draft_tokens,
)

__all__ = ["build_verify_plan", "path_survival", "select_draft_tokens"]
