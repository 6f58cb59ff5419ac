"""The sampling kernel draws the tokens of its definition and keeps the same ids."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, an optional dependency")

from model.ops.dispatch import paths
from model.ops.sampling import Rules, reference, sampling


def rules_of(rows: list[tuple[float, float, int]], seed: int) -> Rules:
    generator = torch.Generator().manual_seed(seed)
    temperature, top_p, top_k = (torch.tensor(column) for column in zip(*rows, strict=True))
    draws = torch.randint(-(2**62), 2**62, (len(rows),), generator=generator)
    places = torch.randint(0, 2**20, (len(rows),), generator=generator)
    return Rules(temperature.double(), top_p.double(), top_k.long(), draws, places)


def assert_equal(got, expected, atol=3e-6):
    assert torch.equal(got.tokens, expected.tokens)
    for a, b in ((got.logprobs, expected.logprobs), (got.full, expected.full)):
        torch.testing.assert_close(a, b, atol=atol, rtol=1e-6, equal_nan=True)
    assert (got.counts is None) == (expected.counts is None)
    if got.counts is not None:
        assert torch.equal(got.counts, expected.counts) and torch.equal(got.ids, expected.ids)


def awkward(rows: int, size: int) -> torch.Tensor:
    torch.manual_seed(0)
    logits = torch.randn(rows, size) * 3
    logits[1] = torch.round(logits[1])
    logits[2, : size // 2] = -torch.inf
    logits[3] = 0.0
    logits[8:, 30:] = -torch.inf
    return logits


ROWS = [
    (1.0, 0.9, 0),
    (0.7, 1.0, 5),
    (1.3, 0.8, 50),
    (1.0, 0.5, 7),
    (0.0, 0.5, 3),
    (1.0, 1.0, 0),
    (0.9, 0.999, 4999),
    (2.0, 1e-9, 0),
    (1.0, 0.7, 39),
    (1.0, 1.0, 39),
]


PLAIN = [(t, 1.0, 0) for t, _, _ in ROWS]


@pytest.mark.parametrize("size", [40, 5000])
@pytest.mark.parametrize("rows", [ROWS, PLAIN])
def test_draws_what_the_definition_draws(interpreted, size, rows):
    logits = awkward(len(rows), size)
    for seed in range(2):
        rules = rules_of(rows, seed)
        got = interpreted("model.ops.sampling.triton", "sampling", logits, rules)
        assert_equal(got, reference.sampling(logits, rules))


@pytest.mark.parametrize("size", [40, 5000])
def test_exact_log_probabilities_of_a_draw_are_a_trainers(interpreted, size):
    logits = awkward(len(PLAIN), size)
    logits[6, 5] = torch.nan
    rules = rules_of(PLAIN, 3)
    got = interpreted("model.ops.sampling.triton", "sampling", logits, rules, exact=True)
    expected = reference.sampling(logits, rules)
    assert_equal(got, expected, atol=0.0)
    assert got.logprobs.isnan().nonzero().tolist() == [[6]]
    kept = ~expected.logprobs.isnan()
    assert torch.equal(got.logprobs[kept], expected.logprobs[kept])


@pytest.mark.parametrize("seed", range(2))
def test_flat_and_peaked_rows_end_where_the_definition_ends_them(interpreted, seed):
    """From one candidate to more than are looked at together, and top-p from anything to all but 1e-14."""
    torch.manual_seed(seed)
    count, size = 24, 5001
    logits = torch.randn(count, size) * torch.linspace(0.1, 12, count)[:, None]
    logits[::3] = torch.round(logits[::3])
    logits[1::5, ::2] = -torch.inf
    top_p = torch.rand(count).double()
    top_p[::2] = 1 - 10.0 ** -(torch.rand(count // 2).double() * 14)
    top_k = torch.randint(0, size, (count,))
    top_k[::4] = 0
    temperature = torch.rand(count) + 0.05
    temperature[0], top_p[0] = 1.0, 0.999
    rows = zip(temperature.tolist(), top_p.tolist(), top_k.tolist(), strict=True)
    rules = rules_of(list(rows), seed)
    got = interpreted("model.ops.sampling.triton", "sampling", logits, rules)
    expected = reference.sampling(logits, rules)
    assert int(expected.counts.max()) > 4096 and int(expected.counts[expected.counts > 0].min()) < 50
    assert_equal(got, expected, atol=1e-5)


def test_rows_that_are_not_finite_leave_the_others_alone(interpreted):
    logits = awkward(5, 300)
    logits[0, 3], logits[1, 0], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 290:], logits[4, 0] = -torch.inf, -torch.inf
    for rule in ((1.0, 0.9, 298), (0.8, 1.0, 0), (0.0, 1.0, 0)):
        rules = rules_of([rule] * 5, 1)
        got = interpreted("model.ops.sampling.triton", "sampling", logits, rules)
        expected = reference.sampling(logits, rules)
        assert got.full.isnan().tolist() == [True, True, True, False, False]
        assert torch.equal(got.tokens[3:], expected.tokens[3:])
        assert ((got.tokens >= 0) & (got.tokens < 300)).all()


def test_a_row_draws_the_same_in_every_batch(interpreted):
    logits, rules = awkward(len(ROWS), 200), rules_of(ROWS, 3)
    together = interpreted("model.ops.sampling.triton", "sampling", logits, rules)
    for row in (0, 2, 5):
        one = Rules(*(getattr(rules, name)[row : row + 1] for name in Rules.__slots__))
        alone = interpreted("model.ops.sampling.triton", "sampling", logits[row : row + 1], one)
        assert alone.tokens[0] == together.tokens[row] and alone.logprobs[0] == together.logprobs[row]


def test_weights_sum_exactly_whatever_their_order():
    logits = awkward(4, 5000)
    mass = reference.weights(logits)
    order = torch.randperm(5000)
    assert torch.equal(mass[:, order].sum(1), mass.sum(1)) and int(mass.amax()) == 2**44
    shares = mass.double() / mass.sum(1, keepdim=True)
    torch.testing.assert_close(shares, logits.double().softmax(1), atol=1e-13, rtol=1e-9)


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match="fp32 logits"):
        sampling(torch.zeros(3, 5, dtype=torch.float64), rules_of([(1.0, 1.0, 0)] * 3, 0))
    with pytest.raises(ValueError, match="up to 524287 ids"):
        sampling(torch.zeros(1, 2**19), rules_of([(1.0, 1.0, 0)], 0))


def test_as_many_ids_as_are_allowed_sum_to_no_more_than_63_bits():
    size = 2**19 - 1
    rules = rules_of([(1.0, 1.0, 0)] * 3, 5)
    tokens = sampling(torch.zeros(3, size), rules).tokens
    draws = reference.uniforms(rules.seed.numpy(), rules.position.numpy())
    assert tokens.tolist() == [int(draw * size) for draw in draws]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [50, 4097, 129280])
def test_a_card_draws_what_the_host_draws(size):
    logits = awkward(len(ROWS), size)
    logits[0, 3] += 20
    on_card = logits.cuda()
    for seed in range(4):
        rules = rules_of(ROWS, seed)
        got = sampling(on_card, rules)
        # The host sums 129,280 terms in float32.
        assert_equal(got, reference.sampling(logits, rules), atol=1e-4)
        assert_equal(sampling(on_card, rules), got)
        assert_equal(sampling(on_card, rules, exact=True), got)
        plain = rules_of(PLAIN, seed)
        got = sampling(on_card, plain, exact=True)
        assert paths()["sampling"] == "triton"
        assert_equal(got, sampling(on_card, plain))
        assert torch.equal(got.logprobs, reference.sampling(on_card, plain).logprobs)
    sampling(on_card, rules)
    assert paths()["sampling"] == "triton"
