"""`temper eval` and `temper merge` as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from temper import ROOT, Home

from model.chat import nano_chat
from model.checkpoint import save_policy
from model.config import PolicyConfig
from model.policy import Policy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def temper(home: Home, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rl.launch.cli", *words],
        env={**os.environ, **home.env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def policy(folder: Path, seed: int) -> str:
    fresh = Policy(PolicyConfig.preset("pico"))
    fresh.reset_parameters(seed)
    save_policy(fresh, folder, chat=nano_chat())
    return str(folder)


def test_two_checkpoints_are_merged_evaluated_and_compared(home: Home) -> None:
    a, b = policy(home.path / "a", 0), policy(home.path / "b", 1)
    merged = temper(home, "merge", f"{a}=0.6", f"{b}=0.4", "--out", str(home.path / "m"))
    assert merged.returncode == 0, merged.stderr
    assert "did not begin as one policy" in merged.stdout
    for name in ("a", "m"):
        words = ("env=sort", "n=3", "k=2", "effort=[1,50]", "scaffold=chat", "max_completion_tokens=6")
        done = temper(home, "eval", str(home.path / name), *words, f"out={home.path / f'eval-{name}'}")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[-1] == str(home.path / f"eval-{name}")
    data = json.loads((home.path / "eval-m" / "result.json").read_text())
    assert [(cell["n"], cell["n_valid"]) for cell in data["cells"]] == [(6, 6), (6, 6)]
    compared = temper(home, "eval", "--compare", str(home.path / "eval-a"), str(home.path / "eval-m"))
    assert compared.returncode == 0, compared.stderr
    assert "on 3 tasks" in compared.stdout
    wrong = temper(home, "eval", a, "efort=1")
    assert (wrong.returncode, "did you mean effort?" in wrong.stderr) == (2, True)
