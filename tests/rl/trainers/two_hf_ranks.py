"""One of two processes that train a model of transformers together; the test compares with one process."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from model.hf.policy import HFPolicy
from model.hf.tiny import tiny_model
from rl.trainers import OptimizerConfig, SFTConfig, SFTTrainer, sharded
from rl.trainers.parallel import full_state, host_policy, load_parts, spread
from rl.trainers.parallel_config import ParallelConfig
from rl.trainers.ranks import Ranks

RATES = OptimizerConfig(learning_rate=1e-3, muon_learning_rate=1e-2, warmup_steps=0)


def train(policy, samples, ranks, *, recompute=False):
    """Two steps; what they said, and the weights after them."""
    trainer = SFTTrainer(
        policy, SFTConfig(token_budget=64, optimizer=RATES, recompute=recompute), ranks=ranks
    )
    metrics = [trainer.step(samples), trainer.step(samples[:1])]
    logprobs = trainer.logprobs(samples)
    return trainer, {"metrics": metrics, "logprobs": logprobs, "weights": dict(full_state(policy))}


def main(folder, rank, size):
    """Trains, writes a checkpoint, reads it back."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    ranks, samples = Ranks(rank, size), torch.load(folder / "inputs.pt", weights_only=False)
    results = {}
    for recompute in (False, True):
        policy = HFPolicy(tiny_model("hf_tiny", 3))
        spread(policy, ParallelConfig(data=size))
        trainer, results[recompute] = train(policy, samples, ranks, recompute=recompute)
    tree = {"policy": dict(policy.state_dict()), "sft": trainer.optimizer.state_dict()}
    sharded.save(folder / "shards", tree, policy, ranks)
    read = sharded.load(folder / "shards", policy, ranks)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    load_parts(policy, read["policy"])
    results["read"] = dict(full_state(policy))
    if rank == 0:
        whole = host_policy(policy, results["read"])
        results["host"] = dict(whole.state_dict())
        torch.save(results, folder / "results.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
