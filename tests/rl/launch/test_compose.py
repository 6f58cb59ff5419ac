from __future__ import annotations

import pytest

from rl.launch.compose import ConfigError, config_groups, load_config, nearest, valid_keys
from rl.launch.config import RunConfig


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    return str(caught.value).splitlines()


def test_the_experiment_sets_what_it_says_and_overrides_win():
    config = load_config(["experiment=calc", "trainer.steps=7", "run.seed=3"])
    assert (config.env.name, config.model.preset, config.algorithm.group_size) == ("calc", "nano", 8)
    assert (config.trainer.steps, config.run.seed) == (7, 3)


def test_every_preset_of_every_group_is_valid():
    groups = config_groups()
    for experiment in groups.pop("experiment"):
        load_config([f"experiment={experiment}"])
    for place in range(max(map(len, groups.values()))):
        chosen = {group: names[place % len(names)] for group, names in groups.items()}
        needs = ["env.mixture.calc=1"] if chosen["env"] == "mixture" else []
        if chosen["engine"] == "vllm":  # which serves models of transformers alone
            chosen["policy"] = "hf"
        if chosen["policy"] == "hf":
            needs.append("trainer.fake_quant=false")
        load_config([*(f"{group}={name}" for group, name in chosen.items()), *needs])


@pytest.mark.parametrize(
    "wrong",
    [
        "trainer.steps=-3",
        "sft.steps=-1",
        "sft.batch_size=0",
        "sft.token_budget=0",
        "trainer.token_budget=-1",
        "trainer.balance_coef=-1",
        "trainer.optimizer.learning_rate=nan",
        "trainer.optimizer.learning_rate=-1",
    ],
)
def test_a_number_out_of_range_is_refused(wrong: str):
    assert len(problems("experiment=calc", wrong)) == 1


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_a_misspelt_key_is_refused_also_with_plus_and_the_right_one_is_named(prefix: str):
    spellings = {
        "algo.group_sze": "algorithm.group_size",
        "algorithm.group_sze": "algorithm.group_size",
        "engine.temprature": "engine.temperature",
        "sft.stepps": "sft.steps",
        "trainer.optimizer.learning_rat": "trainer.optimizer.learning_rate",
        "trainer.optimizer.warmup": "trainer.optimizer.warmup_steps",
    }
    lines = problems("experiment=calc", *(f"{prefix}{wrong}=8" for wrong in spellings))
    told = [f"{wrong}: there is no such key; did you mean {right}?" for wrong, right in spellings.items()]
    assert sorted(lines) == sorted(told)


def test_one_inner_key_leaves_the_other_defaults_of_its_section():
    config = load_config(["experiment=calc", "sft.optimizer.warmup_steps=5"])
    assert config.sft.optimizer.warmup_steps == 5
    assert config.sft.optimizer.muon_learning_rate == load_config([]).sft.optimizer.muon_learning_rate
    assert config.sft.optimizer.decay == "cosine"


def test_all_problems_are_told_at_once():
    lines = problems(
        "experiment=clc", "algo.group_sze=8", "engine.top_p=3", "trainer.steps=many", "loose", "~sft.steps"
    )
    assert [line.partition(":")[0] for line in lines] == [
        "experiment=clc",
        "loose",
        "~sft.steps",
        "algo.group_sze",
        "trainer.steps",
        "engine.top_p",
    ]
    assert "did you mean experiment=calc?" in lines[0]
    assert "'many'" in lines[4]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.group_size=1"], "reinforce_pp"),
        (["algorithm.group_size=500"], "rollout.max_in_flight"),
        (["algorithm.kl=k3"], "kl_coef"),
        (["algorithm.tis_cap=2"], "no effect"),
        (["trainer.temperature=0.5"], "engine.temperature"),
        (["engine.max_completion_tokens=64"], "engine.max_tokens"),
        (["rollout.max_total_tokens=100"], "engine.max_tokens"),
        (["run.resume=true", "run.clean=true", "run.name=x"], "exclude each other"),
        (["effort.levels=[0]"], "from 1 to 100"),
        (["effort.levels=[]"], "at least one"),
        (["effort=priced", "effort.distribution.held_out=[50]"], "levels and held out"),
        (["effort=priced", "effort.length_penalty.efforts=[1,100]"], "set effort.levels only"),
        (["effort=priced", "effort.length_penalty.max_penalty=1.0"], "short wrong answer"),
        (["effort=ladder", "effort.distribution={kind: weighted, weights: [1, 2]}"], "5 levels"),
        (["eval.efforts=[50,1]"], "ascending"),
        (["effort.levels=[100,1]"], "a ladder ascends, each level once: [1, 100]"),
        (["effort.levels=[50,50]"], "a ladder ascends, each level once: [50]"),
        (["effort.levels=high"], "effort.levels: a list is written [high]"),
        (["sft.data=a.jsonl"], "sft.data: a list is written [a.jsonl]"),
        (["sft.validation=[README.md]", "sft.steps=0"], "sft.validation has no effect with sft.steps=0"),
        (["sft.validate_every=5"], "validate_every has no effect without sft.validation"),
        (["sft.validation_samples=5"], "validation_samples has no effect without sft.validation"),
        (["sft.data=[README.md]", "sft.min_score=inf"], "min_score=inf"),
        (["sft.data=[README.md]", "sft.min_score=nan"], "min_score=nan"),
        (["trainer.optimizer.betas=[0.9,nan]"], "betas=[0.9, nan]"),
        (["env.options.highest=nan"], "env.options.highest is nan"),
        (["engine.temperature=inf"], "engine.temperature"),
        (["model.path=x", "model.sliding_window=8"], "remove one of them"),
        (["rollout.staleness=-1"], "rollout.staleness"),
        (["engine.speculate=rejection"], "nano_draft"),
        (["engine.pages=4"], "engine.storage=packed"),
        (["engine.storage=packed", "trainer.fake_quant=false"], "trainer.fake_quant=true"),
        (["engine.replay=some"], "engine.replay"),
        (["engine.cash=1"], "engine.cash"),
        (["trainer.draft.anchors=64"], "nano_draft"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_what_to_change(overrides: list[str], words: str):
    assert words in "\n".join(problems("experiment=calc", *overrides))


def test_a_model_with_a_drafter_may_draft_and_train_it():
    drafting = ["engine.speculate=coupled", "engine.draft_length=3", "sft.draft.anchors=64"]
    config = load_config(["experiment=calc", "model=nano_draft", *drafting])
    assert (config.engine.draft_length, config.sft.draft.anchors) == (3, 64)


def test_shared_settings_are_written_once():
    assert load_config(["experiment=calc", "engine.temperature=0.7"]).trainer.temperature == 0.7
    assert load_config(["experiment=calc", "engine.max_tokens=90"]).rollout.max_total_tokens == 90


def test_short_forms_of_run_settings():
    config = load_config(["experiment=calc", "name=x", "seed=4", "resume=true"])
    assert (config.run.name, config.run.seed, config.run.resume) == ("x", 4, True)


def test_the_efforts_of_a_penalty_are_the_levels():
    penalty = "effort.length_penalty={k0: 0.2, max_penalty: 0.1, length_scale: 40}"
    config = load_config(["experiment=calc", "effort=ladder", penalty])
    assert config.effort.length_penalty is not None
    assert config.effort.length_penalty.efforts == (1, 25, 50, 75, 100)
    assert "efforts must be two or more ascending levels" in problems("experiment=calc", penalty)[0]


def test_options_of_an_environment_are_free():
    assert load_config(["experiment=calc", "env.options.highest=9"]).env.options == {"highest": 9}


def test_a_name_that_is_like_nothing_gets_no_hint():
    assert nearest("zzzz", list(valid_keys(RunConfig))) == ""


def test_a_run_name_cannot_leave_the_root():
    assert "run.name" in problems("experiment=calc", "run.name=../x")[0]


@pytest.mark.parametrize("override", ["engine.top_p=0.9", "engine.top_k=8"])
def test_truncated_sampling_may_be_trained_on(override: str) -> None:
    config = load_config(["experiment=calc", override])
    assert config.trainer.replay_choices == "experts"


def test_a_mixture_takes_bare_shares_and_members_with_settings():
    config = load_config(
        ["env=mixture", "env.mixture.calc=3", "env.mixture.words={share: 1, name: sort, max_in_flight: 16}"]
    )
    assert config.env.title == "calc+words"
    assert (config.env.mixture["calc"].share, config.env.mixture["words"].name) == (3.0, "sort")
    assert config.env.caps == {"words": 16}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env=mixture"], "give several their shares"),
        (
            ["env=calc", "env.mixture.sort=1"],
            r"exclude each other: choose env=mixture.*env\.mixture\.calc=0\.5",
        ),
        (["env=mixture", "env.mixture.calc=0"], "greater than 0"),
        (["env=mixture", "env.mixture.calc=-1"], "greater than 0"),
        (["env=mixture", "env.mixture.calc=nan"], "finite number|greater than 0"),
        (["env=mixture", "env.mixture.calc=half"], "valid number"),
        (["env=mixture", "env.mixture.calc=true"], r"env\.mixture\.calc"),
        (["env=mixture", "env.mixture.calc.shar=1"], r"env\.mixture\.calc\.shar"),
        (["env=mixture", "env.mixture.calc=1", "env.options.x=1"], "no effect on a mixture"),
        (["env=mixture", "env.mixture.calc={share: 1, max_in_flight: 4}"], r"algorithm\.group_size=8"),
        (["env=mixture", "env.mixture.calc={share: 1, max_in_flight: 128}"], "or it has no effect"),
        (["env=mixture", "'env.mixture.a/b=1'"], "digits, dashes and underscores|LexerNoViable|no viable"),
        (["env.latency.mean_s=-1"], r"env\.latency\.mean_s=-1"),
        (["env.latency.mean=1"], r"did you mean env\.latency\.mean_s"),
        (["rollout.filter.zero_variance=false"], "filters nothing"),
        (["rollout.filter.oversample=0.5"], r"rollout\.filter\.oversample=0\.5: set it to 1"),
        (["rollout.filter.attempts=0"], r"rollout\.filter\.attempts=0"),
        (
            ["rollout.filter.min_outcome=0.9", "rollout.filter.max_outcome=0.1"],
            r"at most filter\.max_outcome",
        ),
        (["rollout.staleness=0", "rollout.hold_back_steps=2"], "has no effect under"),
        (["rollout.curriculum.tasks=4"], r"rollout\.curriculum\.function"),
        (["rollout.curriculum={function: frontier, tasks: 0}"], r"rollout\.curriculum\.tasks=0"),
    ],
)
def test_settings_of_mixtures_filters_and_curricula_that_cannot_work_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_config(overrides)
