"""The drafter's loss against a loop over its inference, one anchor at a time."""

import pytest
import torch
from torch.nn import functional as F

from model.config import PolicyConfig
from model.dspark_loss import DraftWeights, draft_anchors, draft_loss
from model.policy import PackedTokens, Policy

LENGTHS = [30, 3, 9, 41]
WEIGHTS = DraftWeights(gamma=3.0)


@pytest.fixture
def policy():
    policy = Policy(PolicyConfig.preset("nano_draft"))
    policy.reset_parameters(2)
    return policy


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    tokens = PackedTokens(
        torch.randint(0, 64, (total,), generator=generator), torch.tensor([0, *LENGTHS]).cumsum(0)
    )
    supervised = torch.rand(total, generator=generator) < 0.8
    supervised[tokens.cu_seqlens[:-1]] = False
    return tokens, supervised


def backbone(policy, tokens):
    with torch.no_grad():
        output = policy(tokens, features=True)
    return output.hidden, output.features


def one_by_one(policy, tokens, supervised, anchors):
    """The loss by drafting after each anchor as inference does, with the true tokens forced."""
    drafter, hidden, features = policy.mtp, *backbone(policy, tokens)
    bounds = tokens.cu_seqlens.tolist()
    sums, weight, accepted = torch.zeros(3), 0.0, 0.0
    for anchor in anchors.tolist():
        start = max(bound for bound in bounds if bound <= anchor)
        stop = min(bound for bound in bounds if bound > anchor)
        window = drafter.new_window(1)
        drafter.observe(window, features[None, start:anchor], policy.fake_quant)
        ids = F.pad(tokens.token_ids[:stop], (0, 6))

        def true_token(_logits, slot, ids=ids, anchor=anchor):
            return ids[anchor + 1 + slot][None]

        draft = drafter.draft(policy, window, tokens.token_ids[anchor][None], choose=true_token)
        survives = 1.0
        for slot in range(5):
            place = anchor + 1 + slot
            if place >= stop or not supervised[place]:
                break
            target = policy.logits(hidden[place - 1]).detach().softmax(-1)
            log_draft = draft.logits[0, slot].log_softmax(-1)
            tv = (log_draft.exp() - target).abs().sum()
            chance = 1 - tv.detach() / 2
            c = draft.confidence[0, slot].sigmoid()
            bce = -(chance * c.log() + (1 - chance) * (1 - c).log())
            decay = torch.exp(torch.tensor(-slot / 3.0))
            sums = sums + decay * torch.stack([-log_draft[tokens.token_ids[place]], tv, bce])
            weight += decay
            survives *= chance
            accepted += survives
    return (torch.tensor([0.1, 0.9, 1.0]) * sums).sum() / weight, accepted / len(anchors)


@pytest.mark.parametrize("fake_quant", [False, True])
@pytest.mark.parametrize("limit", [1 << 23, 64 * 5 * 7])
def test_loss_and_gradients(policy, data, fake_quant, limit):
    policy.fake_quant = fake_quant
    tokens, supervised = data
    hidden, features = backbone(policy, tokens)
    anchors = draft_anchors(tokens, supervised)[::2]
    loss = draft_loss(policy, tokens, hidden, features, supervised, anchors, weights=WEIGHTS, limit=limit)
    expected, accepted = one_by_one(policy, tokens, supervised, anchors)
    assert loss.total.item() == pytest.approx(expected.item(), abs=1e-5)
    assert loss.accepted.item() == pytest.approx(float(accepted), abs=1e-4)
    assert loss.expert_load.sum() == 3 * 2 * 5 * len(anchors)
    parameters = dict(policy.mtp.named_parameters())
    ours = torch.autograd.grad(loss.total, list(parameters.values()), allow_unused=True)
    theirs = torch.autograd.grad(expected, list(parameters.values()), allow_unused=True)
    for name, a, b in zip(parameters, ours, theirs, strict=True):
        assert a is not None and b is not None, name
        assert (a - b).abs().max() <= 1e-3 * b.abs().max() + 1e-6, name
        assert b.abs().max() > 0, name


def test_nothing_flows_into_the_backbone(policy, data):
    tokens, supervised = data
    output = policy(tokens, features=True)
    assert output.features.requires_grad
    anchors = draft_anchors(tokens, supervised)
    loss = draft_loss(
        policy, tokens, output.hidden, output.features, supervised, anchors, weights=WEIGHTS, limit=2000
    )
    loss.total.backward()
    touched = {name.split(".")[0] for name, p in policy.named_parameters() if p.grad is not None}
    assert touched == {"mtp"}


def test_anchors_are_supervised_and_followed_by_a_supervised_token():
    tokens = PackedTokens(torch.zeros(12, dtype=torch.int64), torch.tensor([0, 6, 12]))
    supervised = torch.tensor([0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1], dtype=torch.bool)
    # Token 5 ends its document and 6 begins one; 3 and 10 break a run.
    assert draft_anchors(tokens, supervised).tolist() == [1, 4, 7, 8]


def test_context_ends_before_the_anchor_and_begins_a_window_earlier(policy, data):
    """A change of features outside [anchor - W, anchor) changes nothing, one inside does."""
    tokens, supervised = data
    hidden, features = backbone(policy, tokens)
    anchor = 42 + 30  # position 30 of the last document, with more than a window before it
    supervised = supervised | True
    window = policy.config.sliding_window

    def loss(changed):
        moved = features.clone()
        moved[changed] += 1.0
        args = (policy, tokens, hidden, moved, supervised, torch.tensor([anchor]))
        return draft_loss(*args, weights=WEIGHTS).total.item()

    before = loss([])
    assert loss([anchor, anchor + 1, anchor - window - 1]) == before
    assert loss([anchor - 1]) != before
    assert loss([anchor - window]) != before


@pytest.mark.parametrize("wrong", [{"ce": -1.0}, {"gamma": 0.0}, {"gamma": float("nan")}])
def test_weights_out_of_range(wrong):
    with pytest.raises(ValueError, match="draft loss"):
        DraftWeights(**wrong)
