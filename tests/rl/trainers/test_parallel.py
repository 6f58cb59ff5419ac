"""Two processes train as one does: same loss, gradients and weights, and states that fit any number."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rl.trainers import SFTConfig, SFTTrainer, sharded
from rl.trainers.ranks import ALONE

SCRIPT = Path(__file__).with_name("two_ranks.py")
PROMPT = [4, 10, 11, 20]

_spec = importlib.util.spec_from_file_location("two_ranks", SCRIPT)
assert _spec is not None and _spec.loader is not None
one_rank = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(one_rank)


@pytest.fixture
def inputs(make_sample, make_turn, make_trajectory, make_group):
    rng = np.random.default_rng(0)
    samples = []
    for number, length in enumerate((60, 7, 33, 12, 25, 5, 9)):
        ids = rng.integers(3, 60, size=length)
        samples.append(make_sample(ids.tolist(), [0, *[1] * (length - 1)], id=str(number)))
    groups = []
    for number in range(3):
        trajectories = []
        for index in range(2):
            completion = rng.integers(3, 60, size=int(rng.integers(2, 9))).tolist()
            turn = make_turn(PROMPT, completion, logprobs=(-4 - rng.random(len(completion))).tolist())
            trajectories.append(make_trajectory([[turn]], float(index), group=number, index=index))
        groups.append(make_group(trajectories, number))
    return {"samples": samples, "groups": groups}


def run(folder: Path, size: int, inputs):
    """Runs the script in `size` processes, after one process has written its state."""
    policy = one_rank.make_policy()
    trainer = SFTTrainer(policy, SFTConfig(token_budget=64, optimizer=one_rank.RATES))
    trainer.step(inputs["samples"])
    tree = {"policy": dict(policy.state_dict()), "sft": trainer.optimizer.state_dict()}
    sharded.save(folder / "one", tree, policy, ALONE)
    torch.save(inputs, folder / "inputs.pt")
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), str(rank), str(size)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * size, "\n".join(outputs)
    return tree


def assert_close(found, expected, what):
    scale = expected.abs().max().item()
    assert (found - expected).abs().max().item() <= 1e-5 * max(scale, 1.0), what


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path, inputs):
    tree = run(tmp_path, 2, inputs | {"experts": [1, 2]})
    policy = one_rank.make_policy()
    alone = {
        "sft": one_rank.sft(policy, inputs["samples"], ALONE),
        "rl": one_rank.rl(one_rank.make_policy(), inputs["groups"], ALONE),
        "opd": one_rank.opd(one_rank.make_policy(), inputs["samples"], ALONE),
    }
    for experts in (1, 2):
        together = torch.load(tmp_path / f"results-{experts}.pt", weights_only=False)
        for kind, found in together.items():
            expected = alone[kind]
            for name, value in expected["metrics"].items():
                assert found["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-5), (kind, name)
            assert found["gradients"].keys() == expected["gradients"].keys()
            for name, grad in expected["gradients"].items():
                assert_close(found["gradients"][name], grad, (kind, experts, name))
            for name, weight in expected["weights"].items():
                # Two steps of AdamW move by their rate where a gradient is next to nothing.
                gap = (found["weights"][name].float() - weight.float()).abs().max()
                assert gap <= 0.5 * one_rank.RATES.learning_rate, (kind, experts, name)
        found, expected = together["sft"], alone["sft"]
        np.testing.assert_allclose(found["logprobs"], expected["logprobs"], atol=1e-4)
        assert found["second"]["sft/loss"] == pytest.approx(expected["second"]["sft/loss"], rel=1e-4)
        back = sharded.load(tmp_path / f"two-{experts}", policy, ALONE)
        assert_same_bits(back, tree)


def assert_same_bits(found, expected):
    assert found.keys() == {name for name, value in expected.items() if value is not None and value != {}}
    for name, value in expected.items():
        if isinstance(value, dict):
            assert not value or assert_same_bits(found[name], value) is None
        else:
            assert torch.equal(found[name], value), name
