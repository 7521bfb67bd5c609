"""The worked example of docs/structures.md, run as it is printed there."""

import doctest
from pathlib import Path

STRUCTURES = Path(__file__).resolve().parents[2] / "docs" / "structures.md"


def test_structures_example():
    result = doctest.testfile(str(STRUCTURES), module_relative=False)
    assert result.attempted > 10
    assert result.failed == 0
