"""Two processes train a model of transformers (FSDP2) as one process does."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from model.hf.policy import HFPolicy
from model.hf.tiny import tiny_model
from rl.trainers.ranks import ALONE

SCRIPT = Path(__file__).with_name("two_hf_ranks.py")
_spec = importlib.util.spec_from_file_location("two_hf_ranks", SCRIPT)
assert _spec is not None and _spec.loader is not None
one_rank = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(one_rank)


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path, make_sample):
    rng = np.random.default_rng(0)
    samples = [
        make_sample(rng.integers(3, 60, size=n).tolist(), [0, *[1] * (n - 1)], id=str(i))
        for i, n in enumerate((60, 7, 33, 12, 25, 5, 9))
    ]
    torch.save(samples, tmp_path / "inputs.pt")
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path), str(rank), "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    _, alone = one_rank.train(HFPolicy(tiny_model("hf_tiny", 3)), samples, ALONE)
    results = torch.load(tmp_path / "results.pt", weights_only=False)
    for recompute in (False, True):
        found = results[recompute]
        for step, expected in enumerate(alone["metrics"]):
            for name in ("sft/loss", "sft/grad_norm"):
                assert found["metrics"][step][name] == pytest.approx(expected[name], rel=1e-3), (name, step)
        assert found["weights"].keys() == alone["weights"].keys()
        for name, tensor in alone["weights"].items():
            torch.testing.assert_close(found["weights"][name], tensor, atol=5e-4, rtol=5e-3)
        for own, expected in zip(found["logprobs"], alone["logprobs"], strict=True):
            np.testing.assert_allclose(own, expected, atol=2e-2)
    for name, tensor in results[True]["weights"].items():
        assert torch.equal(results["read"][name], tensor), name
        assert torch.equal(results["host"][name], tensor), name
