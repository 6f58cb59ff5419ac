"""Rows of log-probabilities have the bits that a sampler gives them, wherever they stand."""

import pytest
import torch

from model.choices import log_softmax, tempered


def check(device):
    generator = torch.Generator().manual_seed(0)
    for vocabulary in (1000, 1001, 5001, 32770):
        logits = (torch.randn(24, vocabulary, generator=generator) * 3).to(device)
        for temperature in (1.0, 0.7, 1.3):
            column = torch.full((24, 1), temperature, dtype=torch.float32, device=device)
            scaled = tempered(logits, temperature)
            assert torch.equal(scaled, logits / column)
            whole = log_softmax(scaled)
            torch.testing.assert_close(whole.double(), scaled.double().log_softmax(-1), atol=1e-5, rtol=1e-5)
            for row in range(24):
                assert torch.equal(log_softmax(scaled[row : row + 1].clone())[0], whole[row])


def test_on_a_processor():
    check("cpu")


@pytest.mark.gpu
def test_on_a_card():
    check("cuda")
