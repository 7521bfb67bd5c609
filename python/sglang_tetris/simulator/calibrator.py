"""Where a calibrator of draft probabilities plugs in.

`Calibration` is what policies need of one: the server's own, learning from what was
verified, or none, which takes the draft model at its word.
"""

from typing import Protocol

import numpy as np
import torch

from sglang_tetris.core.calibration import Calibrator
from sglang_tetris.simulator.trees import Choice, Floats, RoundTrees


class Calibration(Protocol):
    """Learns how often drafts are right that the draft model thinks so much of."""

    def calibrate(self, trees: RoundTrees) -> Floats:
        """Return accept probabilities given the parent, `[R, W]` float32."""
        ...

    def update(self, trees: RoundTrees, choice: Choice) -> None:
        """Take in which of the chosen drafts were correct."""
        ...


class NoCalibration:
    """The draft model's own probabilities."""

    def calibrate(self, trees: RoundTrees) -> Floats:
        return trees.probs

    def update(self, trees: RoundTrees, choice: Choice) -> None:
        pass


class LearntCalibration:
    """The server's calibrator, fed as its worker feeds it."""

    def __init__(self) -> None:
        self._calibrator = Calibrator()

    def calibrate(self, trees: RoundTrees) -> Floats:
        found: Floats = self._calibrator.calibrate(
            torch.from_numpy(trees.probs),
            torch.from_numpy(trees.depths),
            torch.from_numpy(trees.ranks),
            torch.from_numpy(trees.sampling_classes),
        ).numpy()
        return found

    def update(self, trees: RoundTrees, choice: Choice) -> None:
        """See core.node_labels: a node teaches if the text went as far as its parent.

        Requests that ended are left out: their last drafts were not compared.
        """
        chosen = trees.depths <= choice if isinstance(choice, int) else choice
        labelled = chosen & trees.is_compared
        labelled &= (trees.num_correct(choice) + 1 < trees.left)[:, None]
        classes = np.broadcast_to(trees.sampling_classes[:, None], labelled.shape)
        self._calibrator.update(
            trees.probs[labelled],
            trees.depths[labelled],
            trees.ranks[labelled],
            classes[labelled],
            trees.is_correct[labelled],
        )
