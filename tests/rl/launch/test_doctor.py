from __future__ import annotations

from pathlib import Path

import pytest

from rl.launch.doctor import Finding, examine, report


def test_everything_is_looked_at():
    names = {finding.name for finding in examine()}
    assert names >= {
        "python",
        "tempering",
        "torch",
        "ray",
        "gpu",
        "disk",
        "wandb",
        "docker",
        "bubblewrap",
        "sandbox",
        "gvisor",
        "function",
    }


def test_a_machine_without_any_sandbox_is_told_both_ways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    found = examine()
    text = "\n".join(report(found))
    assert "MISSING sandbox" in text
    assert "apt-get install -y bubblewrap" in text
    assert "start a Docker engine" in text
    assert "absent  gvisor" in text and "apt-get install runsc" in text
    assert "absent  function" in text
    assert text.endswith("sandbox: not ready to train")


def test_what_is_not_needed_does_not_hinder():
    assert list(report([Finding("gpu", False, "none", needed=False)]))[-1].startswith("ready")
