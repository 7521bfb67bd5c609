"""`sglang.Engine` with TETRIS, set up through `sglang_tetris.configure`."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.e2e import models
from tests.e2e.pool import ServerPool


def test_configure_reaches_the_engine(pool: ServerPool, model_root: Path) -> None:
    target = models.make_target(model_root)
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("engine_program.py")),
            str(target),
            str(target),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        check=False,
    )
    lines = [json.loads(x) for x in done.stdout.splitlines() if x.startswith("{")]
    assert len(lines) == 2, done.stderr[-3000:]
    refused, answer = lines
    assert "--tetris-draft eagle" in refused["refused"]
    (wanted,) = pool.plain(target, [[5, 9, 33, 12]], max_new_tokens=12)
    assert answer["ids"] == wanted
    assert answer["meta"]["tetris"]["draft_budget"] == "2x"
    assert answer["meta"]["spec_num_correct_drafts"] > 0
