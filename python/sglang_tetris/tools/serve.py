"""Serve the prepared model in the foreground: `make serve`.

    python -m sglang_tetris.tools.serve [--arm tetris] [--port 30000] [FLAG ...]

Every other flag goes to `sglang.launch_server` and wins over the arm's own. The
process becomes the server: what ends it (Ctrl-C, a signal) ends the server.
"""

import argparse
import os
import shlex
import sys

from sglang_tetris.tools.arms import ARM_NAMES, DRAFTS, TETRIS, make_arm
from sglang_tetris.tools.prepare_model import prepare


def main(arguments: list[str] | None = None) -> None:
    """Prepare the models, print the command and become it."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--arm", choices=ARM_NAMES, default=TETRIS)
    parser.add_argument("--draft", choices=DRAFTS, default=DRAFTS[0])
    parser.add_argument("--port", type=int, default=30000)
    options, extra = parser.parse_known_args(arguments)
    arm = make_arm(options.arm, prepare(), draft=options.draft)
    command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1"]
    command += ["--port", str(options.port), *arm.flags, *extra]
    print(shlex.join(command), flush=True)
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
