"""What `temper eval` may be told, as key=value words; every key and value is checked, and all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rl.engines.capabilities import EngineName
from rl.engines.vllm_settings import VllmSettings
from rl.launch.config import RunConfig
from rl.launch.words import read_words


class EvalSettings(BaseModel):
    """Settings of an evaluation. Those of sampling and of the environment default to the run's own.

    Attributes:
        env: environments, by registered name or file path.
        options: options of environments: `options={sort: {longest: 12}}`.
        n: tasks of each environment.
        k: samples of each task.
        effort: efforts; each is evaluated on the same tasks with the same seeds.
        scaffold: scaffolds, likewise.
        split: the environments' split.
        seed: of tasks and draws.
        temperature: 0 is greedy.
        max_completion_tokens: bound of a turn; `max_tokens` bounds a whole sequence.
        max_turns: overrides the environment's.
        engine: native, or vllm for a model of transformers; `vllm` says how that is started.
        fake_quant: whether keys are rounded as caches store them.
        exact, storage, replay: of the engine, as in a run.
        pass_at: the k of pass@k; by default 1 and k.
        solved: the score from which a task counts as solved.
        almost: the score from which it counts as almost solved.
        deadlines_s: wall-clock deadlines, in seconds, at which mean@k and almost@k are read off.
        prices: a YAML file of prices (docs/evaluation.md); without one nothing has a cost.
        max_in_flight: samples at a time.
        retries: further attempts of a sample that failed for infrastructure.
        deadline_s: most seconds of one sample; one that takes longer has no score.
        sandbox: the backend of sandboxes; `sandbox_url` the fleet.
        threads: cores of the engine.
        out: the folder of the result, a new one; by default beside the checkpoint's run, named after its
            settings.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: tuple[str, ...] = Field(min_length=1)
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    n: int = Field(default=200, ge=1)
    k: int = Field(default=1, ge=1)
    effort: tuple[int, ...] = Field(min_length=1)
    scaffold: tuple[str, ...] = Field(min_length=1)
    split: str = "eval"
    seed: int = Field(default=7919, ge=0)
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_completion_tokens: int = Field(ge=1)
    max_tokens: int = Field(ge=2)
    max_turns: int | None = Field(default=None, ge=1)
    engine: EngineName = "native"
    vllm: VllmSettings = VllmSettings()
    fake_quant: bool = True
    exact: bool = False
    storage: Literal["dense", "packed"] = "dense"
    replay: Literal["off", "bounded", "exact"] = "off"
    pass_at: tuple[int, ...] = ()
    solved: float = Field(default=1.0, allow_inf_nan=False)
    almost: float = Field(default=0.95, allow_inf_nan=False)
    deadlines_s: tuple[float, ...] = ()
    prices: str = ""
    max_in_flight: int = Field(default=128, ge=1)
    retries: int = Field(default=2, ge=0)
    deadline_s: float = Field(default=600.0, gt=0)
    sandbox: Literal["auto", "docker", "bubblewrap", "gvisor", "function"] = "auto"
    sandbox_url: str = "local"
    threads: int = Field(default=1, ge=1)
    out: str = ""

    @field_validator("env", "effort", "scaffold", "pass_at", "deadlines_s", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return value if isinstance(value, (list, tuple)) else [value]

    @field_validator("env", "effort", "scaffold")
    @classmethod
    def _no_doubles(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(value)) < len(value):
            raise ValueError(f"{list(value)} names one twice; each is evaluated once")
        return value

    @field_validator("effort")
    @classmethod
    def _efforts_in_range(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not all(1 <= effort <= 100 for effort in value):
            raise ValueError(f"{list(value)}: each effort is from 1 to 100")
        return tuple(sorted(value))

    @field_validator("deadlines_s")
    @classmethod
    def _deadlines_ascend(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 < seconds < float("inf") for seconds in value):
            raise ValueError(f"{list(value)}: deadlines are seconds above 0")
        return tuple(sorted(value))

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        wrong = [k for k in self.pass_at if not 1 <= k <= self.k]
        if wrong:
            raise ValueError(
                f"pass_at={wrong}: with k={self.k} samples a task, pass@k is known for 1 to {self.k}"
            )
        if self.max_completion_tokens >= self.max_tokens:
            raise ValueError(
                f"max_completion_tokens={self.max_completion_tokens} leaves no room for a prompt in "
                f"max_tokens={self.max_tokens}; make the second larger"
            )
        if self.engine == "vllm":
            self._check_vllm()
        if self.deadlines_s and self.deadlines_s[-1] > self.deadline_s:
            raise ValueError(
                f"deadlines_s={list(self.deadlines_s)} goes beyond deadline_s={self.deadline_s:g}, after "
                "which a "
                "sample is given up; raise the second"
            )
        if self.temperature == 0 and self.k > 1:
            raise ValueError(f"temperature=0 draws the same answer k={self.k} times; give k=1")
        if unknown := sorted(set(self.options) - set(self.env)):
            raise ValueError(f"options names {', '.join(unknown)}, which env={list(self.env)} does not")
        if not self.sandbox_url:
            raise ValueError("sandbox_url is empty; it is `local` or the address of a fleet's front")
        return self

    def _check_vllm(self) -> None:
        for name in ("fake_quant", "exact"):
            if getattr(self, name):
                raise ValueError(
                    f"engine=vllm does not do {name}=true: set {name}=false for a model of transformers; a "
                    "policy of our own network needs engine=native"
                )
        if self.storage != "dense" or self.replay != "off":
            raise ValueError("engine=vllm has caches of its own: set storage=dense replay=off")

    @property
    def passes(self) -> tuple[int, ...]:
        """The k of pass@k, ascending."""
        return tuple(sorted(set(self.pass_at or (1, self.k))))


CHANGEABLE = frozenset(
    {"pass_at", "solved", "almost", "deadlines_s", "prices", "max_in_flight", "threads"}
    | {"sandbox", "sandbox_url", "retries"}
)
"""Settings that may change when an evaluation goes on: no sample depends on them."""


def read_settings(words: Sequence[str], config: RunConfig) -> EvalSettings:
    """Reads `key=value` words over what the run's configuration gives.

    Raises:
        SettingsError: A word has another form, a key is unknown, or a value is wrong.
    """
    return read_words(EvalSettings, words, _of_run(config))


def changed_settings(words: Sequence[str], stored: Mapping[str, Any]) -> EvalSettings:
    """Reads words over the settings of an evaluation that goes on.

    Raises:
        SettingsError: As above, or a setting that samples depend on is to change.
    """
    fixed = {
        name: f"the samples were drawn with {stored.get(name)!r}; begin another evaluation to change it"
        for name in EvalSettings.model_fields.keys() - CHANGEABLE
    }
    return read_words(EvalSettings, words, stored, fixed)


def _of_run(config: RunConfig) -> dict[str, Any]:
    """What a run's configuration says of an evaluation."""
    engine = config.engine
    return {
        "env": tuple(config.env.named),
        "options": {name: options for name, options in config.env.named.items() if options},
        "effort": config.effort.levels,
        "scaffold": (config.scaffold.name,),
        "split": config.env.eval_split,
        "temperature": engine.temperature,
        "top_p": engine.top_p,
        "top_k": engine.top_k,
        "max_completion_tokens": engine.max_completion_tokens,
        "max_tokens": engine.max_tokens,
        "max_turns": config.scaffold.max_turns,
        "engine": engine.name,
        "vllm": engine.vllm,
        "fake_quant": config.trainer.fake_quant,
        "exact": config.exactness.on,
        "storage": engine.storage,
        "replay": engine.replay,
        "max_in_flight": engine.max_requests,
        "retries": config.rollout.retries,
        "deadline_s": config.rollout.deadline_s,
        "sandbox": config.sandbox.backend,
        "sandbox_url": config.sandbox.url,
        "threads": config.launcher.generator_threads,
    }
