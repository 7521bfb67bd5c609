"""The server's calibrator: applied to what was drafted, taught by what was verified.

Learns in every round with drafts, whatever the budget is. `calibration_path` names a
file that it starts from, if that is there, and is saved to every few hundred rounds,
by rank 0. Ranks may be on machines with other files: all start from rank 0's.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_tetris.adapter.round_record import RoundRecord
from sglang_tetris.adapter.round_view import RoundView
from sglang_tetris.core import Calibrator, DraftTrees, labelled_nodes
from sglang_tetris.core.config import TetrisConfig
from sglang_tetris.core.errors import TetrisConfigError

logger = logging.getLogger(__name__)

# Rounds with labels between two writings of the file: some seconds to a minute.
_SAVE_EVERY = 256


def read_calibration(path: str) -> Calibrator:
    """Return the calibrator in a file, a new one if there is no such file.

    Raises TetrisConfigError in one sentence for a file that holds no calibration.
    """
    try:
        return Calibrator.from_json(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Calibrator()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise TetrisConfigError(
            f"tetris-config.calibration_path must be a saved calibration: {error}"
        ) from error


class RoundCalibration:
    """Calibrates the trees of rounds; does nothing where it is switched off.

    saves  whether this rank writes the file
    share  returns rank 0's text, given this rank's; by default each has its own
    """

    def __init__(
        self,
        config: TetrisConfig,
        *,
        saves: bool,
        share: Callable[[str], str] = lambda own: own,
    ) -> None:
        self._path = config.calibration_path
        self._saves = saves and self._path is not None
        self._calibrator: Calibrator | None = None
        if config.calibration:
            self._calibrator = Calibrator()
            if self._path is not None:
                own = read_calibration(self._path).to_json()
                self._calibrator = Calibrator.from_json(share(own))
        self._unsaved = 0

    def calibrated(self, trees: DraftTrees, view: RoundView) -> DraftTrees:
        """Return the trees with acceptance as it was seen lately."""
        if self._calibrator is None or not trees.max_nodes:
            return trees
        classes = [own.sampling_class for own in view.settings]
        device = trees.tokens.device
        return self._calibrator.calibrate_trees(
            trees, torch.tensor(classes, device=device)
        )

    def learn(self, done: RoundRecord) -> None:
        """Take in what a round has verified."""
        drafted = done.drafted
        if self._calibrator is None or not drafted.max_nodes:
            return
        usable = torch.ones(drafted.batch_size, dtype=torch.bool)
        usable[done.cut_short] = False
        usable = usable.to(drafted.tokens.device)
        found = labelled_nodes(drafted, done.plan, done.accepted, usable=usable)
        classes = [done.view.settings[row].sampling_class for row in found.requests]
        self._calibrator.update(
            found.probs, found.depths, found.ranks, classes, found.correct
        )
        self._unsaved += 1
        if self._saves and self._unsaved >= _SAVE_EVERY:
            self._save(self._calibrator)

    def describe(self) -> dict[str, Any] | None:
        """Return what was learnt, for /server_info; None where switched off."""
        return None if self._calibrator is None else self._calibrator.describe()

    def _save(self, calibrator: Calibrator) -> None:
        self._unsaved = 0
        path = Path(str(self._path))
        written = path.with_name(path.name + ".part")
        try:
            written.write_text(calibrator.to_json(), encoding="utf-8")
            # A reader never sees half a file.
            os.replace(written, path)
        except OSError as error:
            logger.error("TETRIS: the calibration is not saved any more: %s", error)
            self._saves = False
