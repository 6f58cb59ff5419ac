import torch

from model.policy import PackedTokens
from rl.trainers.forward import head_outputs, token_outputs
from rl.trainers.packing import micro_batches


def batch_of(samples):
    (batch,) = micro_batches(samples, 1000, torch.device("cpu"))
    return batch


def test_logprobs_are_those_of_the_tempered_softmax(make_policy, make_sample):
    policy = make_policy()
    batch = batch_of([make_sample([5, 6, 7, 8], [0, 1, 0, 1]), make_sample([9, 10, 11], [0, 1, 1])])
    outputs = token_outputs(policy, batch, temperature=0.7)
    logits = policy.logits(policy(PackedTokens(batch.token_ids, batch.cu_seqlens)).hidden)
    expected = (logits / 0.7).log_softmax(-1)
    for t in range(7):
        want = expected[t - 1, batch.token_ids[t]].item() if batch.loss_mask[t] else 0.0
        assert abs(outputs.logprobs[t].item() - want) < 1e-5
    entropy = torch.distributions.Categorical(logits=logits / 0.7).entropy()
    torch.testing.assert_close(outputs.entropy[1], entropy[0])


def test_chunks_change_nothing(make_policy):
    policy = make_policy()
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 64, generator=generator, requires_grad=True)
    labels = torch.randint(0, 64, (37,), generator=generator)
    results = []
    for limit in (64 * 37, 64 * 5):
        logprobs, entropy, correct = head_outputs(policy, hidden, labels, 1.3, limit)
        grads = torch.autograd.grad(logprobs.sum() + entropy.square().sum(), [hidden, policy.head.weight])
        results.append((logprobs, entropy, correct, *grads))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked)


def test_observations_have_exactly_zero_gradient(make_policy, make_sample):
    """An observation is context, never a label: the head is not even applied where one would be predicted."""
    policy = make_policy()
    sample = make_sample(range(3, 15), [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1])
    seen = []
    apply_head = policy.logits

    def logits(hidden):
        seen.append(hidden)
        return apply_head(hidden)

    policy.logits = logits
    outputs = token_outputs(policy, batch_of([sample]))
    (rows,) = seen
    assert rows.shape[0] == sample.trained_tokens == 6
    (grad,) = torch.autograd.grad(-outputs.logprobs.sum(), rows)
    assert grad.abs().sum(-1).gt(0).all()


def test_logits_at_observation_positions_have_exactly_zero_gradient(make_policy, make_sample):
    policy = make_policy()
    sample = make_sample(range(3, 15), [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1])
    batch = batch_of([sample])
    hidden = policy(PackedTokens(batch.token_ids, batch.cu_seqlens)).hidden.detach().requires_grad_()
    positions = batch.loss_mask.nonzero()[:, 0]
    logprobs, _, _ = head_outputs(policy, hidden[positions - 1], batch.token_ids[positions], 1.0)
    (grad,) = torch.autograd.grad(-logprobs.sum(), hidden)
    predicts_trained = torch.zeros(12, dtype=torch.bool)
    predicts_trained[positions - 1] = True
    assert not grad[~predicts_trained].any() and grad[predicts_trained].abs().sum(-1).gt(0).all()
