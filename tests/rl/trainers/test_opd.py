from dataclasses import replace

import numpy as np
import pytest
import torch

from model.config import PolicyConfig, VisionConfig
from model.images import PreparedImage
from model.policy import PackedTokens, Policy
from rl.algorithms.opd import reverse_kl
from rl.trainers.base import NonFiniteLossError
from rl.trainers.data import SampleImages
from rl.trainers.draft import DraftConfig
from rl.trainers.opd import OPDConfig, OPDTrainer, TeacherConfig
from rl.trainers.optim import OptimizerConfig
from rl.trainers.teachers import TaughtSample, TeacherError, Teachers

FAST = OptimizerConfig(learning_rate=3e-3, warmup_steps=0)


def pico(seed=3):
    policy = Policy(PolicyConfig.preset("pico"))
    policy.reset_parameters(seed)
    return policy


@pytest.fixture
def samples(make_sample):
    rng = np.random.default_rng(0)
    out = []
    for number in range(6):
        ids = rng.integers(3, 60, size=rng.integers(5, 12))
        mask = [0, 0] + [1] * (len(ids) - 2)
        out.append(make_sample(ids, mask, logprobs=-3.0 * np.array(mask), id=f"s{number}", group=number % 2))
    return out


@pytest.fixture
def teachers(make_policy):
    teachers = Teachers(64, fake_quant=False)
    teachers.add("wide", lambda: make_policy(seed=7))
    teachers.add("narrow", pico)
    return teachers


def route(sample):
    return ("wide", "narrow")[sample.group]


def test_the_loss_is_the_exact_kl_to_each_samples_teacher(make_policy, samples, teachers):
    student = make_policy()
    taught = teachers.teach(samples, route)
    policies = {"wide": make_policy(seed=7), "narrow": pico()}
    total, count = 0.0, 0
    for sample in samples:
        tokens = PackedTokens(torch.from_numpy(sample.token_ids).long(), torch.tensor([0, len(sample)]))
        own, other = (p.logits(p(tokens).hidden) for p in (student, policies[route(sample)]))
        kl = reverse_kl(own, other)[:-1][torch.from_numpy(sample.loss_mask[1:])]
        total, count = total + kl.sum().item(), count + len(kl)
    metrics = OPDTrainer(student, OPDConfig(optimizer=FAST, fake_quant=False), teachers).step(taught)
    assert metrics["opd/kl"] == pytest.approx(total / count, rel=1e-4)
    assert metrics["opd/loss"] == pytest.approx(metrics["opd/kl"], rel=1e-5)
    assert {"opd/kl.wide", "opd/kl.narrow"} <= metrics.keys()


@pytest.mark.parametrize("objective", ["exact", "sampled"])
def test_distillation_brings_the_student_closer(make_policy, samples, teachers, objective):
    trainer = OPDTrainer(make_policy(), OPDConfig(optimizer=FAST, objective=objective), teachers)
    probe = OPDTrainer(trainer.policy, OPDConfig(optimizer=OptimizerConfig(learning_rate=0)), teachers)
    taught = teachers.teach(samples, route)
    before = probe.step(taught)["opd/kl"]
    for _ in range(8):
        trainer.step(taught)
    after = probe.step(taught)["opd/kl"]
    assert after < before * (0.8 if objective == "exact" else 1.0)


def test_the_loss_does_not_depend_on_micro_batches(make_policy, samples, teachers):
    taught = teachers.teach(samples, route)
    results = [
        OPDTrainer(make_policy(), OPDConfig(optimizer=FAST, token_budget=b, fake_quant=False), teachers).step(
            taught
        )
        for b in (8192, 13)
    ]
    assert results[0] == pytest.approx(results[1], rel=1e-3)


def test_a_teachers_weight_scales_its_part(make_policy, samples, teachers):
    taught = teachers.teach(samples, route)
    config = OPDConfig(optimizer=FAST)
    metrics = OPDTrainer(make_policy(), config, teachers, {"narrow": 0.0}).step(taught)
    wide = sum(t.sample.trained_tokens for t in taught if t.teacher == "wide")
    share = wide / sum(t.sample.trained_tokens for t in taught)
    assert metrics["opd/loss"] == pytest.approx(metrics["opd/kl.wide"] * share, rel=1e-4)


def test_teachers_come_and_go(make_policy, samples, teachers):
    taught = teachers.teach(samples, route)
    teachers.remove("wide")
    assert teachers.names == ("narrow",)
    with pytest.raises(TeacherError, match=r"unknown teacher 'wide'; active are: narrow"):
        OPDTrainer(make_policy(), OPDConfig(), teachers).step(taught)
    teachers.add("wide", lambda: make_policy(seed=7))
    assert OPDTrainer(make_policy(), OPDConfig(), teachers).step(taught)["opd/kl"] > 0


def test_what_cannot_teach_is_refused(make_policy, samples, teachers):
    with pytest.raises(ValueError, match="teach it anew"):
        TaughtSample(samples[0], "wide", np.zeros((1, 64), np.float32))
    with pytest.raises(TeacherError, match=r"has 64 tokens, the student 100"):
        other = Teachers(100)
        other.add("wide", make_policy)
        other.teach(samples, lambda sample: "wide")
    with pytest.raises(ValueError, match="no sample"):
        OPDTrainer(make_policy(), OPDConfig(), teachers).step([])
    with pytest.raises(ValueError, match="'exact' or 'sampled'"):
        OPDConfig(objective="forward")
    with pytest.raises(ValueError, match="it is 0 or more"):
        TeacherConfig(path="wide", weight=-1.0)


def test_a_loss_that_is_not_finite_leaves_the_weights(make_policy, samples, teachers):
    taught = [TaughtSample(t.sample, t.teacher, t.hidden * np.nan) for t in teachers.teach(samples, route)]
    trainer = OPDTrainer(make_policy(), OPDConfig(), teachers)
    before = trainer.policy.embed.weight.clone()
    with pytest.raises(NonFiniteLossError, match="s"):
        trainer.step(taught)
    assert torch.equal(trainer.policy.embed.weight, before)


VISION = VisionConfig(
    num_hidden_layers=1,
    hidden_size=16,
    num_attention_heads=2,
    intermediate_size=16,
    patch_size=6,
    rope_theta=10000.0,
    downsample_ratio=1,
    max_image_tokens=16,
    min_pixels=36,
    max_wh_ratio=None,
)


def seeing(seed, preset="nano", vision=VISION):
    policy = Policy(replace(PolicyConfig.preset(preset), vision=vision, image_token_id=60))
    policy.reset_parameters(seed)
    return policy


def picture(make_sample, seed):
    """A sample of an image of 2 x 3 patches and a few tokens that look the same for every seed."""
    patches = torch.rand(6, 3, 6, 6, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    image = PreparedImage(patches, (2, 3))
    span = image.types(VISION)
    ids = [5, *[60] * len(span), 9, 10, 11, 12]
    types = np.array([-1, *span, -1, -1, -1, -1], dtype=np.int8)
    mask = [0] * (len(span) + 2) + [1, 1, 1]
    return make_sample(ids, mask, id=f"i{seed}", images=SampleImages(types, (image,)))


def test_the_teacher_sees_the_students_images(make_sample):
    samples = [picture(make_sample, seed) for seed in (1, 2)]
    teachers = Teachers(64, fake_quant=False, vision=VISION)
    teachers.add("all", lambda: seeing(7, "pico"))
    first, second = teachers.teach(samples, lambda sample: "all")
    assert not np.allclose(first.hidden, second.hidden, atol=1e-3)
    student = seeing(3)
    tower = {name: tensor.clone() for name, tensor in student.vision.state_dict().items()}
    bias = student.blocks[0].ffn.gate.bias_vl.clone()
    metrics = OPDTrainer(student, OPDConfig(optimizer=FAST), teachers).step([first, second])
    assert metrics["opd/kl"] > 0
    assert any(not torch.equal(tower[name], tensor) for name, tensor in student.vision.state_dict().items())
    assert not torch.equal(student.blocks[0].ffn.gate.bias_vl, bias)


@pytest.mark.parametrize("vision", [None, replace(VISION, patch_size=4)])
def test_a_teacher_with_other_eyes_is_refused_only_where_there_is_something_to_see(
    make_sample, samples, vision
):
    teachers = Teachers(64, vision=VISION)
    teachers.add("all", lambda: pico() if vision is None else seeing(7, vision=vision))
    assert len(teachers.teach(samples, lambda sample: "all")) == len(samples)
    with pytest.raises(TeacherError, match="does not see images as the student does"):
        teachers.teach([picture(make_sample, 1)], lambda sample: "all")


def test_the_drafter_follows_the_student_and_gives_it_no_gradient(samples):
    def student():
        policy = Policy(PolicyConfig.preset("nano_draft"))
        policy.reset_parameters(3)
        return policy

    teachers = Teachers(64, fake_quant=False)
    teachers.add("all", pico)
    taught = teachers.teach(samples, lambda sample: "all")
    plain, drafting = student(), student()
    OPDTrainer(plain, OPDConfig(optimizer=FAST), teachers).step(taught)
    config = OPDConfig(optimizer=FAST, draft=DraftConfig(anchors=4), recompute=True)
    metrics = OPDTrainer(drafting, config, teachers).step(taught)
    assert any(name.startswith("opd/draft.") for name in metrics)
    moved = set()
    for (name, one), other in zip(plain.named_parameters(), drafting.parameters(), strict=True):
        if not torch.allclose(one, other, atol=1e-6):
            moved.add(name.split(".")[0])
    assert moved == {"mtp"}
