import pytest
import torch

from model.ops.verification import reference, verification


def case(requests=6, slots=3, size=40, seed=0, device="cpu", truncated=True):
    """Drafts drawn from q; request 0 checks none, and the last one has p equal to q."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, slots + 1, (requests,), generator=generator)
    lengths[0], lengths[1:3], lengths[-1] = 0, slots, slots
    first = (lengths + 1).cumsum(0) - (lengths + 1)
    index = first[:, None] + torch.minimum(torch.arange(slots + 1), lengths[:, None])
    target = torch.randn(int((lengths + 1).sum()), size, generator=generator) * 2
    if truncated:
        target[torch.rand(target.shape, generator=generator) < 0.3] = -torch.inf
        target[:, 0] = 0.0
    proposed = torch.randn(slots, requests, size, generator=generator)
    for slot in range(slots):
        proposed[slot][-1] = target[index[-1, slot]]
    drafts = torch.stack([q.softmax(1).multinomial(1, generator=generator)[:, 0] for q in proposed], 1)
    draws = torch.rand(requests, slots, generator=generator, dtype=torch.float64)
    rest = torch.rand(requests, generator=generator, dtype=torch.float64)
    moved = [x.to(device) for x in (index, drafts, lengths, draws, rest)]
    return target.to(device), proposed.to(device), *moved


def test_equal_distributions_are_always_accepted_and_none_checked_is_none_accepted():
    for seed in range(20):
        accepted, tokens = verification(*case(seed=seed))
        assert accepted[-1] == 3 and accepted[0] == 0
        assert ((tokens >= 0) & (tokens < 40)).all()


def test_a_token_that_the_policy_never_draws_is_refused_and_replaced():
    target, proposed, index, drafts, lengths, draws, rest = case()
    drafts[1, 0] = 5
    target[index[1, 0]] = -torch.inf
    target[index[1, 0], [7, 9]] = 0.0
    accepted, tokens = verification(target, proposed, index, drafts, lengths, draws, rest)
    assert accepted[1] == 0 and int(tokens[1]) in (7, 9)


def test_no_drafts_draw_from_the_policy():
    target, _, index, drafts, lengths, draws, rest = case()
    given = index[:, :1], drafts[:, :0], torch.zeros_like(lengths), draws[:, :0], rest
    accepted, tokens = verification(target, target[:0, None], *given)
    cumulative = target[index[:, 0]].double().softmax(1).cumsum(1)
    assert not accepted.any()
    assert torch.equal(tokens, (cumulative <= rest[:, None]).sum(1))


def test_arguments_that_do_not_fit_are_refused():
    target, proposed, index, *rows = case()
    with pytest.raises(ValueError, match="K proposals"):
        verification(target, proposed[:2], index, *rows)


@pytest.mark.parametrize("size", [40, 5000])
def test_kernel(interpreted, size):
    module = "model.ops.verification.triton"
    for seed in range(3):
        arguments = case(size=size, seed=seed)
        arguments[0][arguments[2][2, 1]] = torch.nan
        got = interpreted(module, "verification", *arguments)
        expected = reference.verification(*arguments)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        every_other = [torch.stack((x, x * 0), -1)[..., 0] for x in arguments]
        strided = interpreted(module, "verification", *every_other)
        assert all(torch.equal(a, b) for a, b in zip(strided, expected, strict=True))
    target, _, index, drafts, lengths, draws, rest = arguments
    none = (
        target,
        target[:0, None],
        index[:, :1],
        drafts[:, :0],
        torch.zeros_like(lengths),
        draws[:, :0],
        rest,
    )
    got = interpreted(module, "verification", *none)
    assert all(torch.equal(a, b) for a, b in zip(got, reference.verification(*none), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("requests", "size"), [(6, 50), (64, 129280)])
def test_a_card_decides_as_the_host_does(requests, size):
    for seed in range(2):
        expected = reference.verification(*case(requests, 5, size, seed))
        arguments = case(requests, 5, size, seed, "cuda")
        for _ in range(3):
            got = verification(*arguments)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))
