"""Sampling classes: the bands' edges, and transformed classes apart."""

import pytest

from sglang_tetris.core import (
    NUM_SAMPLING_CLASSES,
    SAMPLING_CLASS_NAMES,
    sampling_class,
)


@pytest.mark.parametrize(
    ("temperature", "name"),
    [
        (0, "greedy"),
        (1e-7, "greedy"),
        (1e-6, "temperature_to_0.5"),
        (0.5, "temperature_to_0.5"),
        (0.51, "temperature_to_0.9"),
        (0.9, "temperature_to_0.9"),
        (1.0, "temperature_over_0.9"),
        (7.0, "temperature_over_0.9"),
    ],
)
def test_bands(temperature, name):
    plain = sampling_class(temperature, transformed=False)
    assert SAMPLING_CLASS_NAMES[plain] == name
    transformed = sampling_class(temperature, transformed=True)
    assert SAMPLING_CLASS_NAMES[transformed] == f"{name}_transformed"


def test_names_are_distinct():
    assert len(set(SAMPLING_CLASS_NAMES)) == NUM_SAMPLING_CLASSES == 8


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf")])
def test_temperatures_that_cannot_be(temperature):
    with pytest.raises(ValueError, match=f"temperature .* {temperature}"):
        sampling_class(temperature, transformed=False)
