from __future__ import annotations

from pathlib import Path

import pytest

from rl.launch import doctor
from rl.launch.doctor import Finding, examine, report


def test_everything_is_looked_at():
    names = {finding.name for finding in examine()}
    assert names >= {
        "python",
        "tempering",
        "torch",
        "ray",
        "gpu",
        "kernels",
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


def test_each_operation_is_named_with_its_path(monkeypatch: pytest.MonkeyPatch):
    taken = {"policy": "kernels", "topk": "triton", "rotary": "triton", "swiglu": "reference for a gradient"}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("model.diagnostics.paths.probe", lambda device: dict(taken))
    finding = doctor._kernels()
    assert not finding.ok and "2 operations by kernel: rotary, topk" in finding.found
    assert "by definition: swiglu (reference for a gradient)" in finding.found
    taken["swiglu"] = "triton"
    assert doctor._kernels().ok and "by definition: none" in doctor._kernels().found


def test_a_policy_that_does_not_run_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    def fails(device: str) -> dict[str, str]:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr("model.diagnostics.paths.probe", fails)
    assert "RuntimeError: no kernel image" in doctor._kernels().found
