import pytest
import torch

from model.ops.linear_logprob import linear_logprob


def test_equals_log_softmax_and_its_entropy():
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 16, dtype=torch.float64), torch.randn(30, 16, dtype=torch.float64)
    labels = torch.randint(0, 30, (7,))
    logprob, entropy, correct = linear_logprob(hidden, weight, labels, temperature=0.7)
    choice = torch.distributions.Categorical(logits=hidden @ weight.T / 0.7)
    torch.testing.assert_close(logprob, choice.log_prob(labels))
    torch.testing.assert_close(entropy, choice.entropy())
    assert correct.tolist() == (choice.logits.argmax(1) == labels).tolist()


def test_gradients_of_both_outputs():
    torch.manual_seed(0)
    hidden = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (5,))
    assert torch.autograd.gradcheck(
        lambda h, w: linear_logprob(h, w, labels, temperature=1.3)[:2], (hidden, weight)
    )


def test_wrong_arguments_are_refused():
    hidden, weight, labels = torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="temperature"):
        linear_logprob(hidden, weight, labels, temperature=0.0)
    with pytest.raises(ValueError, match="must agree"):
        linear_logprob(hidden, weight[:, :3], labels)
