"""Policies by name, as a command line gives them.

none                    plain decoding
fixed-K                 chains of K
tree-S/B                trees of S steps, the B best drafts of every request
paper-K+E               the paper's rule: capacity K per request, chains of K + E
dsd                     one k for the batch, from a global rate
ours-Kx-chains, -trees  budget K per request, by calibrated survival
auto-chains, -trees     the live policy, from measurements alone
auto-chains+profile, auto-trees+profile
                        the same, started from the cost table
...+reading             the same; the draft reads every prompt, as on FlashInfer
oracle-chains, -trees   verifies what will be accepted, drafts if that pays
oracle-free             the same on trees, always drafting to the end
oracle-Kx               at most K per request
"""

import re
from collections.abc import Callable, Mapping

from sglang_tetris.core.cost_table import CostTable
from sglang_tetris.simulator.calibrator import Calibration
from sglang_tetris.simulator.clock import Clock
from sglang_tetris.simulator.forests import Recording
from sglang_tetris.simulator.policies.auto import Auto
from sglang_tetris.simulator.policies.base import Policy
from sglang_tetris.simulator.policies.budgeted import Budgeted, Paper
from sglang_tetris.simulator.policies.dsd import GlobalRate
from sglang_tetris.simulator.policies.fixed import FixedChain, FixedTree, NoSpeculation
from sglang_tetris.simulator.policies.oracle import Oracle

FIXED = tuple(f"fixed-{k}" for k in range(1, 9))
PAPER = tuple(f"paper-{k}+{extra}" for k in range(1, 5) for extra in (1, 2))
# What `auto` is measured against.
BASELINES = ("none", *FIXED, *PAPER, "dsd")
AUTO = ("auto-chains", "auto-trees", "auto-chains+profile", "auto-trees+profile")
OTHERS = ("tree-2/3", "tree-3/6", "ours-1x-trees", "ours-2x-trees", "oracle-trees")

_TOPK = {"chains": 1, "trees": 3}


class Catalog:
    """Makes fresh policies for one server.

    make_calibrator  called once per policy that learns
    """

    def __init__(
        self,
        recording: Recording,
        table: CostTable,
        make_calibrator: Callable[[], Calibration],
    ) -> None:
        self._table, self._clock = table, Clock(table)
        self._depths = {
            kind: recording.forest(topk).max_depth for kind, topk in _TOPK.items()
        }
        self._make_calibrator = make_calibrator

    def make(self, name: str) -> Policy:
        """Return a new policy; ValueError for a name that is none."""
        for pattern, build in self._builders().items():
            match = re.fullmatch(pattern, name)
            if match:
                return build(name, *match.groups())
        raise ValueError(
            f"no policy is called {name!r}; see simulator.policies.catalog"
        )

    def _builders(self) -> Mapping[str, Callable[..., Policy]]:
        return {
            r"none": lambda name: NoSpeculation(name),
            r"fixed-(\d+)": lambda name, k: FixedChain(name, int(k)),
            r"tree-(\d+)/(\d+)": lambda name, steps, drafts: FixedTree(
                name, num_steps=int(steps), num_drafts=int(drafts)
            ),
            r"paper-(\d+)\+(\d+)": lambda name, k, extra: Paper(
                name, int(k), int(extra)
            ),
            r"dsd": lambda name: GlobalRate(name, self._clock),
            r"ours-(\d+)x-(chains|trees)": self._budgeted,
            r"auto-(chains|trees)(\+profile)?(\+reading)?": self._auto,
            r"oracle-(chains|trees)": lambda name, kind: self._oracle(
                name, kind, clock=self._clock
            ),
            r"oracle-free": lambda name: self._oracle(name, "trees"),
            r"oracle-(\d+)x": lambda name, k: self._oracle(
                name, "trees", per_request=int(k)
            ),
        }

    def _budgeted(self, name: str, k: str, kind: str) -> Policy:
        return Budgeted(
            name,
            int(k),
            topk=_TOPK[kind],
            depth=self._depths[kind],
            calibrator=self._make_calibrator(),
        )

    def _auto(
        self, name: str, kind: str, profile: str | None, reading: str | None
    ) -> Policy:
        return Auto(
            name,
            topk=_TOPK[kind],
            max_depth=self._depths[kind],
            calibrator=self._make_calibrator(),
            profile=self._table if profile else None,
            always_reads=reading is not None,
        )

    def _oracle(
        self,
        name: str,
        kind: str,
        *,
        clock: Clock | None = None,
        per_request: int | None = None,
    ) -> Policy:
        return Oracle(
            name,
            topk=_TOPK[kind],
            max_depth=self._depths[kind],
            clock=clock,
            per_request=per_request,
        )
