"""SGLang's slot and token bookkeeping for the CPU, which has no Triton.

Each function has the signature of the one it stands in for (see ``hooks``).
"""

import numpy as np
import numpy.typing as npt
import torch


def assign_extend_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: object,
) -> torch.Tensor:
    """The slots at positions ``start_offset[r] .. end_offset[r] - 1`` of each row."""
    return _ragged_read(req_to_token, req_pool_indices, start_offset, end_offset)


def assign_draft_cache_locs_contiguous(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    positions: torch.Tensor | None = None,
    mrope: torch.Tensor | None = None,
) -> None:
    """Each request's ``topk * num_cols`` slots from position ``seq_lens[r]`` on."""
    if positions is not None or mrope is not None:
        raise RuntimeError("the plain-CPU device does not write draft positions here")
    columns = seq_lens.unsqueeze(1) + torch.arange(topk * num_cols)
    rows = req_to_token[req_pool_indices.unsqueeze(1), columns]
    out_cache_loc.copy_(rows.view(-1))


def fill_front_out_cache_loc(
    num_front: torch.Tensor,
    out_cache_loc: torch.Tensor,
    front_out_cache_loc: torch.Tensor,
) -> None:
    """Pack the first ``num_front[r]`` slots of request r's window."""
    window = out_cache_loc.view(num_front.numel(), -1)
    front = window[torch.arange(window.shape[1]) < num_front.unsqueeze(1)]
    front_out_cache_loc[: front.numel()] = front


def fill_accept_out_cache_loc(
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_out_cache_loc: torch.Tensor,
    size: int,
) -> None:
    """Pack the slots of the accepted rows (``accept_index``, -1 padded)."""
    index = accept_index.reshape(-1)
    accepted = out_cache_loc[index[index >= 0].to(torch.int64)]
    accept_out_cache_loc[: accepted.numel()] = accepted


def fill_bonus_tokens(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """The last accepted token of each request."""
    last = torch.arange(batch_size) * accept_stride + accept_lens.to(torch.int64) - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[last])


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write slots to positions ``start_offset[r] .. end_offset[r] - 1``."""
    rows, columns = _ragged_index(req_pool_indices, start_offset, end_offset)
    req_to_token.numpy()[rows, columns] = out_cache_loc[: len(rows)].numpy()


def last_loc(
    req_to_token: torch.Tensor,
    req_pool_indices_tensor: torch.Tensor,
    prefix_lens_tensor: torch.Tensor,
) -> torch.Tensor:
    """The slot of the last prefix token, -1 where the prefix is empty."""
    column = (prefix_lens_tensor - 1).clamp(min=0)
    slots = req_to_token[req_pool_indices_tensor, column].to(prefix_lens_tensor.dtype)
    return torch.where(prefix_lens_tensor > 0, slots, -1)


def gather_spec_extras(
    indices: torch.Tensor,
    topk_p_buf: torch.Tensor,
    topk_index_buf: torch.Tensor,
    output_tokens_buf: torch.Tensor,
    hidden_states_buf: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The rows ``indices`` of every buffer."""
    hidden = None if hidden_states_buf is None else hidden_states_buf[indices]
    return (
        topk_p_buf[indices],
        topk_index_buf[indices],
        output_tokens_buf[indices],
        hidden,
    )


def _ragged_index(
    req_rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row and column of every position ``starts[r] .. ends[r] - 1``, in order.

    In NumPy, whose calls on a few numbers take a tenth of torch's.
    """
    begins = starts.numpy().astype(np.int64)
    lens = ends.numpy() - begins
    shift = (begins - lens.cumsum() + lens).repeat(lens)
    return req_rows.numpy().repeat(lens), np.arange(len(shift)) + shift


def _ragged_read(
    req_to_token: torch.Tensor,
    req_rows: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    rows, columns = _ragged_index(req_rows, starts, ends)
    return torch.from_numpy(req_to_token.numpy()[rows, columns].astype(np.int64))
