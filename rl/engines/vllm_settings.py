"""How vLLM is started: what a run may set of it, and what follows from the run's other settings.

Nothing here imports vLLM, so that a configuration is checked where it is not installed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

Dtype = Literal["float32", "bfloat16", "float16"]

OWNED = frozenset(
    {
        "model", "tokenizer", "skip_tokenizer_init", "max_model_len", "max_num_seqs", "logprobs_mode",
        "worker_extension_cls", "tensor_parallel_size", "data_parallel_size", "dtype", "enforce_eager",
        "enable_prefix_caching", "enable_return_routed_experts", "gpu_memory_utilization",
        "max_num_batched_tokens", "disable_log_stats", "enable_log_requests", "speculative_config",
        "max_logprobs",
    }
)  # fmt: skip
"""Arguments of vLLM that follow from settings of ours, or that this engine depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """The section `engine.vllm`: how a replica of vLLM runs.

    Attributes:
        tensor_parallel: devices (on a CPU: processes) that share every layer.
        data_parallel: copies of the model in one replica, each with requests of its own.
        dtype: of weights and caches; auto takes the checkpoint's.
        kv_cache_gb: memory of the caches on a CPU, whole gigabytes.
        gpu_memory: share of a GPU's memory that weights and caches may take.
        batched_tokens: most tokens a step; none: vLLM's choice.
        prefix_caching: whether beginnings of histories are kept; those of other weights are never used.
        expert_ids: whether the experts that tokens went to are recorded (mixtures of experts only).
        compile: whether vLLM compiles the model at its start: slower to start, faster to sample.
        start_s: seconds that a start may take.
        arguments: more of vLLM's engine arguments, by its names.
    """

    tensor_parallel: int = 1
    data_parallel: int = 1
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_gb: int = 1
    gpu_memory: float = 0.9
    batched_tokens: int | None = None
    prefix_caching: bool = True
    expert_ids: bool = False
    compile: bool = False
    start_s: float = 600.0
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "data_parallel", "kv_cache_gb"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine.vllm.{name}={getattr(self, name)} is at least 1")
        if not 0 < self.gpu_memory <= 1 or self.start_s <= 0:
            raise ValueError(
                f"engine.vllm.gpu_memory={self.gpu_memory:g} is a share above 0 and at most 1, and "
                f"engine.vllm.start_s={self.start_s:g} is above 0"
            )
        if owned := sorted(OWNED & set(self.arguments)):
            raise ValueError(
                f"engine.vllm.arguments.{owned[0]} follows from other settings of the run: set engine.* or "
                "engine.vllm.* instead"
            )

    def of_model(self, stored: Dtype | None) -> Self:
        """Returns these settings for weights of a known type: with auto, vLLM rounds float32 to bfloat16."""
        return self if self.dtype != "auto" or stored is None else replace(self, dtype=stored)

    def engine_arguments(self, folder: Path, *, max_requests: int, max_tokens: int) -> dict[str, Any]:
        """Returns vLLM's engine arguments for the model in `folder`."""
        arguments: dict[str, Any] = dict(self.arguments) | {
            "model": str(folder),
            "skip_tokenizer_init": True,
            "max_model_len": max_tokens,
            "max_num_seqs": max_requests,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": "rl.engines.vllm_worker.WeightsExtension",
            "tensor_parallel_size": self.tensor_parallel,
            "data_parallel_size": self.data_parallel,
            "dtype": self.dtype,
            "enforce_eager": not self.compile,
            "enable_prefix_caching": self.prefix_caching,
            "enable_return_routed_experts": self.expert_ids,
            "gpu_memory_utilization": self.gpu_memory,
            "disable_log_stats": True,
            "enable_log_requests": False,
        }
        if self.batched_tokens is not None:
            arguments["max_num_batched_tokens"] = self.batched_tokens
        return arguments

    def set_environment(self, threads: int) -> None:
        """Sets what vLLM reads from the environment; a variable that is already set stays."""
        wanted = {
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gb),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(max(threads, 1)),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_ENGINE_READY_TIMEOUT_S": str(int(self.start_s)),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        }
        if not self.compile:
            wanted["TORCHDYNAMO_DISABLE"] = (
                "1"  # a helper of vLLM's sampler would be compiled at the first token
            )
        for name, value in wanted.items():
            os.environ.setdefault(name, value)
