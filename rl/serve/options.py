"""What `temper serve` is told: which policy, where, with which engine; refused where it makes no sense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict

from rl.checkpoint import CheckpointStore
from rl.engines.capabilities import EngineName
from rl.engines.prefixes import PrefixSizes, Tier
from rl.engines.vllm_settings import VllmSettings
from rl.launch.config import RunConfig
from rl.launch.runs import find_run
from rl.launch.words import read_words
from sandbox.errors import PolicyError
from sandbox.serving import Bind

_DRAIN_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What to serve and how.

    Attributes:
        target: A checkpoint folder, or a run by name or folder.
        root: The folder of the runs.
        step: Of a run's checkpoints; None: the newest.
        name: The model's name; empty: that of the run or folder.
        max_requests: Requests served at the same time; others wait.
        context: The most tokens of a sequence; None: the run's, or what the checkpoint was made for.
        effort: When a request names none; None: the checkpoint's own default.
        threads: Cores; None: all.
        device: As torch calls it.
        packed: Whether caches hold rounded keys on pages.
        packed_experts: Whether routed experts stay in the FP4 of the checkpoint.
        speculate: Whether the checkpoint's drafter drafts.
        prefix_store: The last tier of the prefix store.
        prefix: Its sizes.
        bind: Where to listen.
        token_file: The token of callers, made when it is not there; None: none is needed, on loopback.
        settings: Words that choose the engine: `engine=vllm`, `engine.vllm.KEY=VALUE`.
        drain_s: Seconds that answers have to end when it is told to stop.
    """

    target: str
    root: Path = Path("runs")
    step: int | None = None
    name: str = ""
    max_requests: int = 16
    context: int | None = None
    effort: int | None = None
    threads: int | None = None
    device: str = "cpu"
    packed: bool = False
    packed_experts: bool = False
    speculate: bool = False
    prefix_store: Tier = "off"
    prefix: PrefixSizes = field(default_factory=PrefixSizes)
    bind: Bind = field(default_factory=Bind)
    token_file: Path | None = None
    settings: Sequence[str] = ()
    drain_s: float = _DRAIN_S

    def check(self) -> None:
        """Refuses what makes no sense together.

        Raises:
            PolicyError: An address that others can reach without a token, or too little of something.
        """
        self.bind.check()
        if self.bind.public and self.token_file is None:
            raise PolicyError(
                f"{self.bind.host} can be reached by others: give --token-file FILE (it is made, and "
                "holds the API key of the callers)"
            )
        if self.prefix_store != "off" and not self.packed:
            raise PolicyError("--prefix-store keeps packed pages: give --packed too")
        if self.max_requests < 1 or (self.threads is not None and self.threads < 1):
            raise PolicyError("--max-requests and --threads are at least 1")
        if self.context is not None and self.context < 2:
            raise PolicyError("--context is at least 2: a prompt and one token")


@dataclass(frozen=True, slots=True)
class Source:
    """A policy's folder, what it is called, the run that it is of, and the step of that."""

    folder: Path
    name: str
    run: RunConfig | None = None
    step: int = 0


def find_source(options: ServeOptions) -> Source:
    """Finds the folder of what is to be served.

    Raises:
        ValueError: There is no such checkpoint or run, or a run without a usable checkpoint.
    """
    path = Path(options.target).expanduser()
    if (path / "config.json").is_file():
        return Source(path, path.resolve().name)
    if (path / "policy" / "config.json").is_file():
        return Source(path / "policy", path.resolve().name)
    run = find_run(options.target, options.root)
    checkpoint = CheckpointStore(run / "checkpoints").latest(options.step)
    if checkpoint is None:
        raise PolicyError(f"run {run.name} has no checkpoint yet: it writes one every checkpoint.every steps")
    config = RunConfig.model_validate(yaml.safe_load((run / "resolved.yaml").read_text(encoding="utf-8")))
    return Source(checkpoint.path / "policy", run.name, config, checkpoint.step)


class EngineSettings(BaseModel):
    """What the words of `temper serve` may set.

    Attributes:
        engine: native, or vllm for a model of transformers.
        vllm: how that is started.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: EngineName
    vllm: VllmSettings


def engine_settings(options: ServeOptions, source: Source) -> EngineSettings:
    """Reads the words over the settings of the run.

    Raises:
        SettingsError: A word makes no sense.
        PolicyError: Options are given that belong to the other engine.
    """
    run = source.run
    base = {"engine": "native", "vllm": VllmSettings()}
    if run is not None:
        base = {"engine": run.engine.name, "vllm": run.engine.vllm}
    settings = read_words(EngineSettings, options.settings, base)
    own = options.packed or options.packed_experts or options.speculate or options.device != "cpu"
    if settings.engine == "vllm" and own:
        raise PolicyError(
            "--packed, --packed-experts, --speculate, --prefix-store and --device belong to engine=native: "
            "vLLM has its own weights, caches, drafts and device"
        )
    return settings
