"""What the benchmark of a model of transformers asks for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import hf_calc
from rl.launch.compose import load_config


def test_it_imitates_before_it_reinforces_and_judges_the_rise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = list[list[str]]()

    def train(root: Path, name: str, overrides: list[str]) -> float:
        asked.append(overrides)
        return 500.0

    rows = {
        version: {"sampled/score.mean": score, "greedy/score.mean": score, "kl.mismatch.mean": 1e-6}
        for version, score in ((0, 0.25), (60, 0.5))
    }
    monkeypatch.setattr(hf_calc, "train", train)
    monkeypatch.setattr(hf_calc, "evaluations", lambda run, env: rows)
    monkeypatch.setattr(sys, "argv", ["hf_calc", "--steps", "60"])
    assert hf_calc.main() == 1
    assert "MISS rise of the sampled score: 0.25 >= 0.3" in capsys.readouterr().out
    config = load_config(asked[0])
    assert (config.env.title, config.policy.kind, config.trainer.steps) == ("calc", "hf", 60)
    assert config.sft.steps > 0
    rows[60]["sampled/score.mean"] = 0.6
    assert hf_calc.main() == 0
