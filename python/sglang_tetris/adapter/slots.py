"""KV slots of a round's rows, and a batch that is handed back as it was.

A request owns the slots `req_to_token[r, 0 : allocated]`; a round's rows take the ones
that follow its committed tokens: row j of request r is slot seq_len + j.
"""

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def flat_slots(
    req_to_token_pool: Any,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
) -> torch.Tensor:
    """Return the slots of positions starts .. starts + lens - 1, request by request.

    req_pool_indices, starts, lens are `[bs]`; the result is `[sum(lens)]` int64.
    """
    request = torch.repeat_interleave(lens.to(torch.int64))
    ends = lens.cumsum(0)
    place = torch.arange(request.shape[0], device=request.device)
    place = place - (ends - lens)[request]
    columns = starts[request] + place
    rows = req_pool_indices[request].to(torch.int64)
    return req_to_token_pool.req_to_token[rows, columns].to(torch.int64)


@contextmanager
def restored(batch: Any) -> Iterator[None]:
    """Give the batch's fields back their values when the block ends.

    SGLang builds a forward's input from the batch's own fields, so each of a round's
    three forwards sets them for itself.
    """
    names = _field_names(type(batch))
    before = [getattr(batch, name) for name in names]
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(batch, name, value)


@functools.cache
def _field_names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]
