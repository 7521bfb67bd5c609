"""The simulator's cost tables: readable, sourced, and what their script writes."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from sglang_tetris.core.cost_table import PHASES, CostTable
from sglang_tetris.core.round_cost import RoundCost

FOLDER = Path(__file__).resolve().parents[3] / "benchmark/simulator"
TABLES = sorted((FOLDER / "cost_tables").glob("*.json"))
COMPUTED = [
    path
    for path in TABLES
    if json.loads(path.read_text())["provenance"].get("measured") is False
]


def test_there_are_three_gpu_like_ones():
    assert len(COMPUTED) == 3


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_table_has_every_part_of_a_round_and_says_where_it_comes_from(path):
    table = CostTable.from_json(path.read_text())
    needed = set(PHASES) - {"prompt", "sample_sorted"}
    assert needed <= set(table.phases)
    assert json.loads(path.read_text())["provenance"]
    # A server can start from it.
    RoundCost(table).table()


@pytest.mark.parametrize("path", COMPUTED, ids=lambda path: path.stem)
def test_sources_and_arithmetic_are_stated(path):
    provenance = json.loads(path.read_text())["provenance"]
    assert "data sheet" in provenance["gpu_source"]
    assert provenance["model_source"]
    assert len(provenance["arithmetic"]) == 4


def test_the_tables_are_what_the_script_writes(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location(
        "made", FOLDER / "make_cost_tables.py"
    )
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    monkeypatch.setattr(made, "TABLES", tmp_path)
    made.main()
    capsys.readouterr()
    for path in COMPUTED:
        assert (tmp_path / path.name).read_text() == path.read_text()


def test_a_decode_step_of_llama_8b_is_near_what_is_measured_in_public():
    """SGLang's documentation: 158 tokens/s on one H100 without speculation."""
    table = CostTable.from_json((FOLDER / "cost_tables/h100-llama-8b.json").read_text())
    one = np.array([1])
    step_s = sum(
        table.phases[name].step_times_s(
            total_verify_tokens=one, batch_size=1, total_kv_tokens=300
        )[0]
        for name in ("decode", "outside", "sample_greedy")
    )
    assert 1 / step_s == pytest.approx(158, rel=0.05)
