"""Errors of the core, and the argument checks that raise them.

Every message names the argument and prints the value that was wrong. The checks read
only what the host already knows (type, shape, dtype, device): none waits for a device.
"""

import operator
from collections.abc import Sequence

import torch


class TetrisConfigError(ValueError):
    """A flag, a configuration key or a request parameter has an unusable value."""


def check_tensor(
    name: str,
    value: object,
    layout: str,
    shape: Sequence[int],
    dtype: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device | None = None,
) -> None:
    """Raise ValueError unless `value` is a tensor of that shape, dtype and device.

    `layout` is the shape in words, for the message: ``"[bs, max_nodes]"``. A negative
    number in `shape` stands for any size.
    """
    if not isinstance(value, torch.Tensor):
        # The contract has one exception for every unusable argument: ValueError.
        raise ValueError(f"{name} must be a tensor, got {value!r}")
    if tuple(value.shape) != tuple(shape) and not _fits(value.shape, shape):
        sizes = ", ".join("any" if size < 0 else str(size) for size in shape)
        raise ValueError(
            f"{name} must have shape {layout} = [{sizes}], got {list(value.shape)}"
        )
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if value.dtype not in dtypes:
        wanted = " or ".join(str(choice) for choice in dtypes)
        raise ValueError(f"{name} must be {wanted}, got {value.dtype}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} must be on {device}, got {value.device}")


def _fits(got: Sequence[int], wanted: Sequence[int]) -> bool:
    return len(got) == len(wanted) and all(
        want < 0 or want == size for want, size in zip(wanted, got, strict=True)
    )


def check_count(name: str, value: object, *, minimum: int = 0) -> int:
    """Return `value` as an int, or raise ValueError if it is none or below `minimum`.

    Booleans and 0-d tensors are refused: the first are a slip of the caller, reading
    the second could wait for a device.
    """
    if isinstance(value, (bool, torch.Tensor)):
        raise ValueError(f"{name} must be an int, got {value!r}")
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} must be an int, got {value!r}") from None
    if count < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {count}")
    return count


def on_plain_cpu(tensor: torch.Tensor) -> bool:
    """Whether reading the tensor's values needs no wait and is possible at all.

    Subclasses (fake and functional tensors among them) have no values to read.
    """
    return tensor.device.type == "cpu" and type(tensor) is torch.Tensor
