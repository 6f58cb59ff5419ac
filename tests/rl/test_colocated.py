"""Training and generation in turns on the same weights."""

import asyncio
import threading
from typing import Any

import pytest
import torch

from model.config import PolicyConfig
from model.engine.sampler import SamplingParams
from model.policy import Policy
from rl.colocated import Colocated, share_tensors
from rl.engines.base import GenerateRequest
from rl.engines.native import NativeEngine
from rl.launch.compose import ConfigError, load_config


class Trainer:
    """A learner in small: its step changes the weights in place, as an optimiser does, or fails."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.version = policy, 0
        self.error: Exception | None = None
        self.training, self.go = threading.Event(), threading.Event()

    def weights(self) -> tuple[dict[str, torch.Tensor], int]:
        return self.policy.state_dict(), self.version

    def step(self, batch: Any) -> dict[str, float]:
        self.training.set()
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.mul_(1.01)
        self.version += 1
        return {"train/loss": 1.0}


@pytest.fixture
async def parts():
    owner, twin = (Policy(PolicyConfig.preset("nano")) for _ in range(2))
    owner.reset_parameters(1)
    share_tensors(twin, owner)
    engine = NativeEngine(twin, max_requests=4, max_tokens=4096)
    trainer = Trainer(owner)
    colocated = Colocated(trainer, None, engine)  # type: ignore[arg-type]
    yield trainer, engine, colocated
    trainer.go.set()
    await engine.close()


def request(session: str = "s", tokens: int = 3000) -> GenerateRequest:
    return GenerateRequest(session, 0, (1, 2, 3), SamplingParams(max_tokens=tokens, seed=5))


async def test_both_policies_are_the_same_memory(parts) -> None:
    trainer, engine, _ = parts
    twin = engine._engine.policy
    for (name, mine), theirs in zip(
        trainer.policy.state_dict().items(), twin.state_dict().values(), strict=True
    ):
        assert mine.data_ptr() == theirs.data_ptr(), name
    trainer.policy.fake_quant = True
    assert not twin.fake_quant


@pytest.mark.parametrize("error", [None, RuntimeError("out of memory")])
async def test_training_preempts_the_rollouts_which_go_on_whatever_becomes_of_it(parts, error) -> None:
    trainer, engine, colocated = parts
    trainer.error = error
    turn = asyncio.create_task(engine.generate(request()))
    async with asyncio.timeout(60):
        while engine.stats()["generated_tokens"] < 5:  # noqa: ASYNC110  counters have no event
            await asyncio.sleep(0.001)
        step = asyncio.create_task(colocated.step(None))
        await asyncio.to_thread(trainer.training.wait, 30)
        at_rest = engine.stats()["generated_tokens"]
        await asyncio.sleep(0.05)
        assert engine.stats()["generated_tokens"] == at_rest
        trainer.go.set()
        if error is None:
            assert await step == {"train/loss": 1.0}
        else:
            with pytest.raises(RuntimeError, match="out of memory"):
                await step
        while engine.stats()["generated_tokens"] < at_rest + 5:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await engine.abort("s")
        versions = (await turn).policy_versions
    assert set(versions[: int(at_rest)]) == {0}
    assert set(versions[int(at_rest) :]) == {trainer.version}
    update = await colocated.publish()
    assert update["weights.bytes"] == 0 and (error or update["weights.held_up_s"] > 0)


async def test_a_step_that_is_cancelled_lets_the_engine_go_on_only_when_its_thread_has_ended(parts) -> None:
    trainer, engine, colocated = parts
    step = asyncio.create_task(colocated.step(None))
    await asyncio.to_thread(trainer.training.wait, 30)
    step.cancel()
    await asyncio.sleep(0.05)
    assert not step.done() and engine._engine.paused
    trainer.go.set()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert engine.version == 1 and not engine._engine.paused


def test_one_process_is_not_several() -> None:
    with pytest.raises(ConfigError, match=r"set launcher\.placement=split"):
        load_config(["experiment=calc", "launcher.placement=colocated", "launcher.replicas=2"])
