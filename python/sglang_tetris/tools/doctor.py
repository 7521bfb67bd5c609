"""Say whether the installed SGLang is one that TETRIS can join.

    python -m sglang_tetris.tools.doctor

Prints the supported and the installed version and every SGLang symbol that differs
from what the adapter relies on. Exit status 0: TETRIS registers itself; 1: it does
not, and SGLang works without it.
"""

import sys

from sglang_tetris.adapter import upstream


def main() -> int:
    """Print the report; 0 if nothing differs, otherwise 1."""
    print(f"supported SGLang: {upstream.SUPPORTED_VERSION}")
    print(f"installed SGLang: {upstream.installed_version() or 'none'}")
    mismatches = upstream.check()
    for mismatch in mismatches:
        print(f"  {mismatch}")
    if mismatches:
        print(
            f"TETRIS is off: {len(mismatches)} symbols differ. Install its SGLang: "
            f"pip install sglang=={upstream.SUPPORTED_VERSION}"
        )
        return 1
    print(f"all {len(upstream.expected_symbols())} symbols that TETRIS uses fit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
