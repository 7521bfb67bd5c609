"""Reading `--tetris-cost-table`: a table as `tools.profile_cost` writes it."""

from pathlib import Path

from sglang_tetris.core import CostTable
from sglang_tetris.core.errors import TetrisConfigError


def read_cost_table(path: str) -> CostTable:
    """Return the table in a file; TetrisConfigError in one sentence if there is none.

    A table without phases prices the verify forward alone, which is not enough here.
    """
    try:
        table = CostTable.from_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise TetrisConfigError(
            f"--tetris-cost-table must be a readable cost table: {error}"
        ) from error
    missing = {"decode", "draft_step", "draft_extend"} - set(table.phases)
    if missing:
        raise TetrisConfigError(
            f"--tetris-cost-table {path} lacks the phases {sorted(missing)}: write it "
            "with python -m sglang_tetris.tools.profile_cost"
        )
    return table
