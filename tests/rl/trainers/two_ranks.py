"""One of two processes that train together; what they compute is compared with one process by the test."""

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from model.config import PolicyConfig
from model.policy import Policy
from rl.algorithms import AlgorithmConfig
from rl.trainers import OptimizerConfig, RLConfig, RLTrainer, SFTConfig, SFTTrainer, sharded, shards
from rl.trainers.experts import stacked_name
from rl.trainers.opd import OPDConfig, OPDTrainer
from rl.trainers.parallel import full_state, spread
from rl.trainers.parallel_config import ParallelConfig
from rl.trainers.ranks import Ranks
from rl.trainers.teachers import Teachers

RATES = OptimizerConfig(
    learning_rate=1e-3, muon_learning_rate=1e-2, balanced_learning_rate=1e-2, warmup_steps=0, head_wise=True
)


def make_policy():
    policy = Policy(PolicyConfig.preset("nano"))
    policy.reset_parameters(3)
    return policy


def full_gradients(trainer):
    """Gradients by name, whole, as in one process."""
    found, waiting = {}, {}
    for name, parameter in trainer.policy.named_parameters():
        stack, second = stacked_name(name)
        if parameter.grad is None:
            continue
        grad = shards.whole(parameter.grad)
        grad = grad.to_dense() if grad.is_sparse else grad
        if stack == name:
            found[name] = grad.clone()
        elif second:
            found[stack] = torch.cat([waiting.pop(stack), grad])
        else:
            waiting[stack] = grad
    return found


def with_gradients(trainer, step):
    """What a step returns, and the gradients it applies (all ranks' sums, before clipping is undone)."""
    applied, gradients = trainer.optimizer.step, {}

    def keep(fraction):
        gradients.update(full_gradients(trainer))
        applied(fraction)

    trainer.optimizer.step = keep
    metrics = step()
    trainer.optimizer.step = applied
    return metrics, gradients


def sft(policy, samples, ranks, **settings):
    config = SFTConfig(token_budget=64, optimizer=RATES, balance_coef=0.1, indexer_coef=0.1, **settings)
    trainer = SFTTrainer(policy, config, ranks=ranks)
    metrics, gradients = with_gradients(trainer, lambda: trainer.step(samples))
    second = trainer.step(samples[:1])
    logprobs = trainer.logprobs(samples)
    result = {"metrics": metrics, "second": second, "gradients": gradients}
    result["logprobs"] = np.concatenate(logprobs)
    result["weights"] = dict(full_state(policy))
    return result


def rl(policy, groups, ranks):
    config = RLConfig(token_budget=32, optimizer=RATES, balance_coef=0.1, indexer_coef=0.1, fake_quant=False)
    trainer = RLTrainer(policy, config, AlgorithmConfig(entropy_coef=0.01), ranks=ranks)
    metrics, gradients = with_gradients(trainer, lambda: trainer.step(groups))
    return {"metrics": metrics, "gradients": gradients, "weights": dict(full_state(policy))}


def opd(policy, samples, ranks):
    def teacher():
        made = Policy(PolicyConfig.preset("pico"))
        made.reset_parameters(7)
        return made

    teachers = Teachers(policy.config.vocab_size, token_budget=64, fake_quant=False, ranks=ranks)
    for name in ("even", "odd"):
        teachers.add(name, teacher)
    taught = teachers.teach(samples, lambda sample: "odd" if int(sample.id) % 2 else "even")
    config = OPDConfig(token_budget=64, optimizer=RATES, balance_coef=0.1, indexer_coef=0.1, fake_quant=False)
    trainer = OPDTrainer(policy, config, teachers, {"odd": 2.0}, ranks=ranks)
    metrics, gradients = with_gradients(trainer, lambda: trainer.step(taught))
    return {"metrics": metrics, "gradients": gradients, "weights": dict(full_state(policy))}


def reshard(policy, folder, ranks, layout):
    """Reads what one process wrote, and writes it again."""
    trainer = SFTTrainer(policy, SFTConfig(token_budget=64, optimizer=RATES), ranks=ranks)
    state = sharded.load(folder / "one", policy, ranks)
    trainer.optimizer.load_state_dict(state["sft"])
    own = policy.state_dict()
    for name, tensor in state["policy"].items():
        shards.part(own[name]).copy_(shards.part_of_stored(own[name], tensor))
    tree = {"policy": policy.state_dict(), "sft": trainer.optimizer.state_dict()}
    sharded.save(folder / f"two-{layout}", tree, policy, ranks)


def main(folder: Path, rank: int, size: int):
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    inputs = torch.load(folder / "inputs.pt", weights_only=False)
    for expert in inputs["experts"]:
        ranks = Ranks(rank, size)

        def policy(expert=expert):
            made = make_policy()
            spread(made, ParallelConfig(data=size, expert=expert))
            return made

        results = {"sft": sft(policy(), inputs["samples"], ranks, recompute=expert == 1)}
        if expert > 1:
            results["rl"] = rl(policy(), inputs["groups"], ranks)
            results["opd"] = opd(policy(), inputs["samples"], ranks)
        with torch.no_grad():
            reshard(policy(), folder, ranks, expert)
        if rank == 0:
            torch.save(results, folder / f"results-{expert}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    else:
        os.abort()
