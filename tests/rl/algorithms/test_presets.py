"""Every algorithm has a preset, and every preset is one that can run."""

from pathlib import Path

import pytest
import yaml

import conf
from rl.algorithms import AlgorithmConfig
from rl.algorithms.advantages import ADVANTAGES
from rl.algorithms.losses import LOSSES

PRESETS = sorted(Path(conf.__path__[0], "algorithm").glob("*.yaml"))


def load(path):
    return AlgorithmConfig(**yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_says_what_it_is_and_is_valid(path):
    assert path.read_text().startswith("# ")
    assert load(path).group_size == 8


def test_every_algorithm_has_a_preset():
    presets = [load(path) for path in PRESETS]
    assert {p.loss for p in presets} == set(LOSSES.names())
    assert {p.advantage for p in presets} == set(ADVANTAGES.names())
    assert AlgorithmConfig() in presets
