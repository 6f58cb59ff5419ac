"""The configuration of a run: one validated model, composed of the components' own settings.

Hydra composes the groups of `conf/`; this model validates the result and knows every key. A component that
has settings owns a frozen dataclass; the sections without a component of their own stand here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from model.config import PolicyConfig
from rewards.length import LengthPenaltyConfig
from rl.algorithms.config import AlgorithmConfig
from rl.engines.capabilities import EngineName, check_engine
from rl.engines.prefixes import PrefixSizes, Tier
from rl.engines.vllm_settings import VllmSettings
from rl.launch.config_env import Env
from rl.launch.config_exact import Device, Exactness, check_exact, exactness, repeated_choices
from rl.launch.config_policy import PolicySection, check_policy
from rl.launch.inert import refuse_inert
from rl.launch.section import Section
from rl.rollout.config import RolloutConfig
from rl.rollout.efforts import EffortDistribution, Efforts
from rl.trainers.choices import ReplayChoices
from rl.trainers.critic import CriticConfig
from rl.trainers.opd import OPDConfig
from rl.trainers.rl import RLConfig
from rl.trainers.sft import SFTConfig
from rl.transports import Medium


class Run(Section):
    """Which run this is. An empty `name` makes one; an existing one needs `resume` or `clean`."""

    name: str = ""
    root: str = "runs"
    seed: int = Field(default=0, ge=0)
    resume: bool = False
    clean: bool = False

    @field_validator("name")
    @classmethod
    def _is_a_folder_name(cls, name: str) -> str:
        if name and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(
                f"{name!r} is no name of a folder: use letters, digits, dots, dashes and underscores, "
                "beginning with a letter or digit; the place of runs is run.root"
            )
        return name


class Model(Section):
    """The policy to start from: a preset's fresh weights, or a checkpoint folder (`path`).

    Attributes:
        sliding_window: tokens that a window sees, other than the preset's; null keeps the preset's. A
            checkpoint folder has its own.
        exact: trainer and sampler compute a token's log-probability to the same last bit, whatever is
            batched, chunked or interrupted, where one version of the weights computed its whole context.
            `auto`: where that costs at most 1.25x: on GPUs by kernels (docs/policy.md).
    """

    preset: str = "nano"
    path: str = ""
    sliding_window: int | None = Field(default=None, ge=1)
    exact: Literal["auto"] | bool = "auto"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.path and self.sliding_window is not None:
            raise ValueError(
                f"model.sliding_window={self.sliding_window} has no effect with model.path={self.path}, "
                "whose own config.json says it; remove one of them"
            )
        return self

    def fresh(self) -> PolicyConfig:
        """Returns the shape of the policy that a run without a checkpoint starts from."""
        preset = PolicyConfig.preset(self.preset)
        if self.sliding_window is None:
            return preset
        return replace(preset, sliding_window=self.sliding_window)


class Scaffold(Section):
    """How the policy is put to work."""

    name: str = "tools"
    max_turns: int | None = Field(default=None, ge=1)


class SandboxSection(Section):
    """Where tools run. `auto` prefers Docker and says which it took.

    Attributes:
        url: `local` for a node on this machine, which the run starts; else the address of a fleet's front
            (`temper sandbox serve`), whose token the environment names.
        lease_s: How long the sandboxes of samples under way outlive a run that was killed or interrupted, so
            that it goes on in them when it is resumed. After that they are made anew from their journals.
    """

    url: str = "local"
    backend: Literal["auto", "docker", "bubblewrap", "gvisor", "function"] = "auto"
    tool_timeout_s: float = Field(default=10.0, gt=0)
    lease_s: float = Field(default=600.0, gt=0)


class EngineSection(Section):
    """The inference engine and how it samples. `max_tokens` bounds a whole sequence.

    Attributes:
        speculate: whether the drafter's proposals are checked several tokens at a time, and the rule by which
            they are accepted: `rejection` accepts most, `coupled` gives the very tokens of plain decoding.
        draft_length: drafts checked a step and request; null follows measured costs.
        storage: of the caches: floats, or packed records on pages (smaller; on a CPU slower, see
            `benchmarks.engine`; needs trainer.fake_quant).
        pages: packed only: pages of compressed keys for all sequences together; none: as many as they can
            need. When they run out, requests wait and lose nothing.
        replay: how much of a prompt runs through the decoder: all (off), its last window (bounded), or all
            that its last window depends on (exact).
        prefix_store: where beginnings of histories are kept for later requests: nowhere (off), in
            memory, or in memory and on disk. Needs engine.storage=packed.
        prefix: its sizes.
        persist_from: an interruption keeps the caches of turns with at least so many tokens on disk, beside
            the token log; shorter ones are computed again.
        stage_weights: new weights are copied beside the old ones while requests go on, and only exchanged in
            the pause; takes the policy's memory twice meanwhile. Otherwise they are copied in the pause.
        scales_every: in every so many-th forward pass block scales at their limits are counted
            (`quant/rollout/...`); 0 never counts.
        vllm: how vLLM is started, with engine=vllm.
    """

    name: EngineName = "native"
    max_requests: int = Field(default=128, ge=1)
    max_tokens: int = Field(default=64, ge=2)
    max_completion_tokens: int = Field(default=16, ge=1)
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    persist_from: int = Field(default=256, ge=1)
    speculate: Literal["off", "rejection", "coupled"] = "off"
    draft_length: int | None = Field(default=None, ge=1)
    storage: Literal["dense", "packed"] = "dense"
    pages: int | None = Field(default=None, ge=1)
    replay: Literal["off", "bounded", "exact"] = "off"
    prefix_store: Tier = "off"
    prefix: PrefixSizes = PrefixSizes()
    stage_weights: bool = True
    scales_every: int = Field(default=200, ge=0)
    vllm: VllmSettings = VllmSettings()

    @model_validator(mode="after")
    def _pages_are_packed(self) -> Self:
        if self.prefix_store != "off" and self.storage != "packed":
            raise ValueError(
                f"engine.prefix_store={self.prefix_store} keeps packed pages: set engine.storage=packed, or "
                "engine.prefix_store=off"
            )
        if self.pages is not None and self.storage != "packed":
            raise ValueError(
                f"engine.pages={self.pages} belongs to packed caches: set engine.storage=packed, or leave it "
                "out"
            )
        return self


class Effort(Section):
    """The efforts to train at, and the length penalty (none: lengths are not rewarded).

    Attributes:
        levels: the ladder of efforts; evaluations use these.
        distribution: how the efforts of training tasks are drawn.
        in_prompt: whether the policy is told the effort; without, it cannot follow it (a control).
    """

    levels: tuple[int, ...] = (50,)
    distribution: EffortDistribution = Field(default_factory=EffortDistribution)
    in_prompt: bool = True
    length_penalty: LengthPenaltyConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _levels_of_the_penalty(cls, data: Any) -> Any:
        """The penalty's efforts are the levels, which need not be written twice."""
        penalty = data.get("length_penalty") if isinstance(data, Mapping) else None
        if isinstance(penalty, Mapping) and "efforts" not in penalty:
            levels = data.get("levels", cls.model_fields["levels"].default)
            return {**data, "length_penalty": {**penalty, "efforts": levels}}
        return data

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.levels or not all(1 <= level <= 100 for level in self.levels):
            raise ValueError(f"levels={list(self.levels)}: give at least one effort, each from 1 to 100")
        if list(self.levels) != sorted(set(self.levels)):
            raise ValueError(
                f"levels={list(self.levels)}: a ladder ascends, each level once: {sorted(set(self.levels))}"
            )
        self.draws(0)
        penalty = self.length_penalty
        if penalty is not None and penalty.efforts != self.levels:
            raise ValueError(
                f"effort.length_penalty.efforts={list(penalty.efforts)} are not effort.levels="
                f"{list(self.levels)}, from which b_min and tau follow; set effort.levels only"
            )
        return self

    def draws(self, seed: int) -> Efforts:
        """Returns the efforts of every task of a run with this seed."""
        return Efforts(self.levels, self.distribution, seed)


class Eval(Section):
    """Evaluation: so many tasks of the evaluation split, so many samples of each when sampling.

    Attributes:
        efforts: the grid of efforts of the cost-quality curve, which is measured at the end of a run (greedy,
            every effort on the same tasks); none: no curve.
        effort_tasks: tasks an effort of the curve.
    """

    tasks: int = Field(default=200, ge=1)
    samples: int = Field(default=2, ge=1)
    efforts: tuple[int, ...] = ()
    effort_tasks: int = Field(default=200, ge=2)

    @field_validator("efforts")
    @classmethod
    def _is_a_grid(cls, efforts: tuple[int, ...]) -> tuple[int, ...]:
        if list(efforts) != sorted(set(efforts)) or not all(1 <= effort <= 100 for effort in efforts):
            raise ValueError(f"eval.efforts={list(efforts)}: give ascending efforts, each from 1 to 100")
        return efforts


class Checkpoints(Section):
    """When checkpoints are written, in optimiser steps, and how many stay. 0 switches a rule off."""

    every: int = Field(default=20, ge=1)
    sft_every: int = Field(default=0, ge=0)
    keep: int = Field(default=2, ge=1)
    keep_every: int = Field(default=0, ge=0)


class LoggerSection(Section):
    """Where numbers go beside metrics.jsonl, and how the terminal shows them."""

    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    project: str = "tempering"
    console: Literal["auto", "rich", "plain"] = "auto"


class Launcher(Section):
    """Where the processes run. An empty `address` starts a private Ray cluster on this machine.

    Attributes:
        placement: `split` gives trainer and generators processes of their own; `colocated` lets one process
            do both in turns, on the same weights: training preempts the rollouts at a token boundary.
        replicas: generator processes; samples go to the least loaded. A resumed run keeps its number.
        prefill_replicas: engines that compute prompts for the generators, which then only decode; 0: each
            generator computes its own.
        encode_replicas: engines that encode images for the prefill engines; 0: these do it themselves.
        restarts: how often a process may die without progress between; a successor goes on with its samples.
        weights: how they travel: `shared_memory` within one host, `object_store` or `collective` (NCCL
            between GPUs, Gloo between CPUs) between hosts.
        weights_deadline_s: a generator that takes weights no faster is replaced.
        strategy: how processes are put on the nodes of a cluster (Ray's placement strategies).
        learner_cpus: cores reserved on the learner's node; likewise replica_cpus.
        learner_gpus: GPUs reserved likewise; with one the policy is trained on it (by one process).
        replica_gpus: of each generator, which samples on it.
        placement_deadline_s: how long to wait for reserved resources.
    """

    address: str = ""
    placement: Literal["split", "colocated"] = "split"
    replicas: int = Field(default=1, ge=1)
    prefill_replicas: int = Field(default=0, ge=0)
    encode_replicas: int = Field(default=0, ge=0)
    restarts: int = Field(default=3, ge=0)
    weights: Medium = "shared_memory"
    weights_deadline_s: float = Field(default=120.0, gt=0)
    strategy: Literal["pack", "spread", "strict_pack", "strict_spread"] = "pack"
    learner_cpus: float = Field(default=1.0, ge=0)
    replica_cpus: float = Field(default=1.0, ge=0)
    learner_gpus: float = Field(default=0.0, ge=0)
    replica_gpus: float = Field(default=0.0, ge=0)
    placement_deadline_s: float = Field(default=60.0, gt=0)
    sft_threads: int = Field(default=2, ge=1)
    trainer_threads: int = Field(default=1, ge=1)
    generator_threads: int = Field(default=1, ge=1)
    object_store_bytes: int = Field(default=128 << 20, ge=78_643_200)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.encode_replicas and not self.prefill_replicas:
            raise ValueError(
                f"launcher.encode_replicas={self.encode_replicas} encode images for prefill engines, and "
                "there are none: set launcher.prefill_replicas to at least 1, or launcher.encode_replicas=0"
            )
        if self.placement == "colocated" and (self.replicas > 1 or self.prefill_replicas):
            raise ValueError(
                f"launcher.placement=colocated is one process that trains and generates; with "
                f"launcher.replicas={self.replicas} and launcher.prefill_replicas={self.prefill_replicas} "
                "set launcher.placement=split"
            )
        if not (self.learner_cpus or self.learner_gpus) or not (self.replica_cpus or self.replica_gpus):
            raise ValueError(
                "a process that reserves nothing cannot be placed: set launcher.learner_cpus (or "
                "learner_gpus) and launcher.replica_cpus (or replica_gpus) above 0"
            )
        return self


class RunConfig(Section):
    """Everything a run is told."""

    run: Run = Field(default_factory=Run)
    model: Model = Field(default_factory=Model)
    policy: PolicySection = Field(default_factory=PolicySection)
    env: Env
    scaffold: Scaffold = Field(default_factory=Scaffold)
    sandbox: SandboxSection = Field(default_factory=SandboxSection)
    sft: SFTConfig = Field(default_factory=SFTConfig)
    trainer: RLConfig = Field(default_factory=RLConfig)
    opd: OPDConfig = Field(default_factory=OPDConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    engine: EngineSection = Field(default_factory=EngineSection)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    effort: Effort = Field(default_factory=Effort)
    eval: Eval = Field(default_factory=Eval)
    checkpoint: Checkpoints = Field(default_factory=Checkpoints)
    logger: LoggerSection = Field(default_factory=LoggerSection)
    launcher: Launcher = Field(default_factory=Launcher)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        check_policy(self)
        self.rollout.check_group_size(self.algorithm.group_size)
        check_engine(self)
        check_exact(self)
        self._check_drafter()
        self._check_training()
        if not self.model.path and self.policy.kind == "native":
            self.trainer.parallel.check(PolicyConfig.preset(self.model.preset))
        self._check_caps()
        self._check_distillation()
        if self.engine.max_completion_tokens >= self.engine.max_tokens:
            raise ValueError(
                f"engine.max_completion_tokens={self.engine.max_completion_tokens} leaves no room for a "
                f"prompt in engine.max_tokens={self.engine.max_tokens}; make the second larger"
            )
        if self.engine.storage == "packed" and not self.trainer.fake_quant:
            raise ValueError(
                "engine.storage=packed holds rounded keys: set trainer.fake_quant=true, or "
                "engine.storage=dense"
            )
        if self.trainer.temperature != self.engine.temperature:
            raise ValueError(
                f"trainer.temperature={self.trainer.temperature} and engine.temperature="
                f"{self.engine.temperature} differ: the trainer would compare with another distribution; set "
                "engine.temperature only, the other follows"
            )
        if self.run.resume and self.run.clean:
            raise ValueError("run.resume and run.clean exclude each other; give one of them")
        if self.rollout.max_total_tokens > self.engine.max_tokens:
            raise ValueError(
                f"rollout.max_total_tokens={self.rollout.max_total_tokens} is more than a sequence of the "
                f"engine may have (engine.max_tokens={self.engine.max_tokens}); raise the second "
                "or lower the first"
            )
        return self

    def _check_training(self) -> None:
        if not self.algorithm.needs_critic and self.trainer.critic != CriticConfig():
            raise ValueError(
                f"trainer.critic has no effect with algorithm.advantage={self.algorithm.advantage}; set "
                "algorithm=ppo, or leave it out"
            )
        if self.algorithm.needs_reference and self.trainer.parallel.data > 1:
            raise ValueError(
                f"algorithm.kl_coef={self.algorithm.kl_coef} with trainer.parallel.data="
                f"{self.trainer.parallel.data}: the reference policy is not divided over processes so far; "
                "set one of them to its default"
            )
        for name in ("data", "validation"):
            if getattr(self.sft, name) and not self.sft.steps:
                raise ValueError(f"sft.{name} has no effect with sft.steps=0; set sft.steps, or leave it out")
            for path in getattr(self.sft, name):
                if not Path(path).expanduser().exists():
                    raise ValueError(f"sft.{name}: there is no {path} (seen from {Path.cwd()})")

    @property
    def trainer_device(self) -> Device:
        """Where the policy is trained: on the learner's GPU if it reserves one."""
        launcher = self.launcher
        gpus = launcher.learner_gpus
        if launcher.placement == "colocated":
            gpus = max(gpus, launcher.replica_gpus)
        # Several processes exchange gradients over Gloo, on the host.
        return "cuda" if gpus and self.trainer.parallel.data == 1 else "cpu"

    @property
    def engine_device(self) -> Device:
        """Where it is sampled from: on the generators' GPUs if they reserve some."""
        if self.launcher.placement == "colocated":
            return self.trainer_device
        return "cuda" if self.launcher.replica_gpus else "cpu"

    @property
    def exactness(self) -> Exactness:
        """Whether trainer and sampler are exact; what `model.exact` comes to."""
        return exactness(self)

    @property
    def replay_choices(self) -> ReplayChoices:
        """Which of the sampler's choices the engine records and training repeats."""
        return repeated_choices(self, self.exactness.on)

    @property
    def learning_steps(self) -> int:
        """Optimiser steps after the warm start: of distillation when there are teachers, else of RL."""
        return self.opd.steps if self.opd.teachers else self.trainer.steps

    def _check_distillation(self) -> None:
        refuse_inert(self.opd, self.trainer, self.algorithm, self.effort.length_penalty)
        if not self.opd.teachers:
            return
        if self.trainer.steps:
            raise ValueError(
                f"opd.teachers and trainer.steps={self.trainer.steps}: a run distils or reinforces; set "
                "trainer.steps=0, or take the teachers out, and give the next run model.path"
            )
        for name in ("temperature", "fake_quant"):
            ours = self.engine.temperature if name == "temperature" else self.trainer.fake_quant
            if getattr(self.opd, name) != ours:
                raise ValueError(
                    f"opd.{name}={getattr(self.opd, name)} is not the sampler's ({ours}): the loss would be "
                    f"of another distribution; set opd.{name}={ours}"
                )
        if self.engine.top_p < 1 or self.engine.top_k:
            raise ValueError(
                "opd.teachers: a distillation samples from the whole distribution; set engine.top_p=1 "
                "engine.top_k=0"
            )

    def _check_caps(self) -> None:
        size, everyone = self.algorithm.group_size, self.rollout.max_in_flight
        for name, cap in self.env.caps.items():
            if not size <= cap < everyone:
                raise ValueError(
                    f"env.mixture.{name}.max_in_flight={cap} must be at least algorithm.group_size={size}, "
                    f"or no group fits, and below rollout.max_in_flight={everyone}, or it has no effect"
                )

    def _check_drafter(self) -> None:
        trained = self.trainer.draft.anchors or self.sft.draft.anchors or self.opd.draft.anchors
        if self.model.path or self.policy.kind == "hf" or not (trained or self.engine.speculate != "off"):
            return
        if not self.model.fresh().num_nextn_predict_layers:
            raise ValueError(
                f"model.preset={self.model.preset} has no drafter to speculate with or to train; take "
                "model=nano_draft, or leave engine.speculate=off and the drafts' anchors at 0"
            )
