"""Batch speculative decoding with globally trimmed draft trees, for SGLang."""

__all__ = ["configure"]


def configure(**settings: str | int | None) -> None:
    """Set the TETRIS options of the `sglang.Engine`s started next in this process.

    Takes the command line's keys: `tetris_budget`, `tetris_verify`, `tetris_draft`,
    `tetris_cost_table`, `tetris_trace`, `tetris_config`. What is not named goes back to
    its default. Raises ValueError for an unknown key or a value that is not valid.
    """
    # SGLang imports this package in every process; only users of this call need torch.
    from sglang_tetris.adapter import options

    options.configure(**settings)
