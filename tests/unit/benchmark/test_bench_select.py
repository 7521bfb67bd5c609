"""The allocator's benchmark runs, and its C loop still does what the core's does."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_a_short_run_writes_every_row(tmp_path):
    output = tmp_path / "allocator.json"
    script = ROOT / "benchmark" / "allocator" / "bench_select.py"
    done = subprocess.run(
        [sys.executable, str(script), "--repeats", "2", "--output", str(output)],
        capture_output=True,
        text=True,
        check=False,
    )
    # It compares the two loops' results itself and stops where they differ.
    assert done.returncode == 0, done.stderr
    record = json.loads(output.read_text())
    rows = record["results"]
    for size in ((64, 63), (512, 63)):
        implementations = {
            row["implementation"]
            for row in rows
            if (row["batch_size"], row["max_nodes"]) == size
        }
        assert implementations == {"numba", "torch"}
    assert all(row["both_wall_ms"]["median"] > 0 for row in rows)
    assert [row["batch_size"] for row in record["selection_loop"]] == [64, 512]
    assert record["provenance"]["machine"]["threads"] == 1
