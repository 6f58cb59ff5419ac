import pytest
import torch

from model.ops.dispatch import paths
from model.ops.hyper_boundary import hyper_boundary
from model.ops.hyper_boundary.reference import coefficients, sinkhorn


def _inputs(count=5, width=32):
    torch.manual_seed(0)
    streams, branch = torch.randn(count, 4, width), torch.randn(count, width)
    projection, base, scale = torch.randn(24, 4 * width) * 0.05, torch.randn(24), torch.rand(3)
    return streams, branch, projection, base, scale, torch.rand(width)


def test_sinkhorn_rows_and_columns_sum_to_one():
    mix = sinkhorn(torch.randn(8, 4, 4))
    torch.testing.assert_close(mix.sum(1), torch.ones(8, 4), atol=1e-4, rtol=0)
    torch.testing.assert_close(mix.sum(2), torch.ones(8, 4), atol=1e-2, rtol=0)


def test_coefficients_ignore_the_size_of_the_streams():
    streams, _, projection, base, scale, _ = _inputs()
    torch.testing.assert_close(
        coefficients(streams, projection, base, scale), coefficients(streams * 7, projection, base, scale)
    )


def test_boundary_written_out_for_one_token():
    streams, branch, projection, base, scale, norm = _inputs()
    k = coefficients(streams, projection, base, scale)
    updated, normed, following = hyper_boundary(streams, branch, k, projection, base, scale, norm)
    a, c, mix = k[2, :4], k[2, 4:8], k[2, 8:].view(4, 4)
    for o in range(4):
        expected = c[o] * branch[2] + sum(mix[i, o] * streams[2, i] for i in range(4))
        torch.testing.assert_close(updated[2, o], expected)
    x = sum(a[s] * updated[2, s] for s in range(4))
    torch.testing.assert_close(normed[2], torch.nn.functional.rms_norm(x, (32,), norm, 1e-6))
    torch.testing.assert_close(following, coefficients(updated, projection, base, scale))


def test_gradients_flow_through_the_definition():
    arguments = [x.double().requires_grad_() for x in _inputs(2, 8)]

    def run(x, y, p, b, s, n):
        k = coefficients(x, p, b, s)
        return hyper_boundary(x, y, k, p, b, s, n)[1]

    assert torch.autograd.grad(run(*arguments).sum(), arguments)[0].shape == arguments[0].shape
    assert paths()["hyper_boundary"] == "reference for the gradient"


def test_wrong_shapes_are_refused():
    streams, branch, projection, base, scale, norm = _inputs()
    with pytest.raises(ValueError, match="must be"):
        hyper_boundary(streams[:, :3], branch, torch.zeros(5, 24), projection, base, scale, norm)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_what_kernels_keep_of_a_projection_follows_every_optimizer(options, monkeypatch):
    from model.ops.hyper_boundary import triton

    # What is kept does not matter here, and on a CPU no kernel makes it.
    monkeypatch.setattr(triton, "split_projection", split_projection := torch.Tensor.double)
    split_of = triton.split_of
    projection = torch.nn.Parameter(torch.randn(24, 128))
    optimizer = torch.optim.AdamW([projection], lr=0.1, **options)
    kept = split_of(projection)
    for _ in range(2):
        projection.grad = torch.ones_like(projection)
        optimizer.step()
        assert split_of(projection).data_ptr() == kept.data_ptr()
        assert torch.equal(kept, split_projection(projection))
    with torch.no_grad():
        projection.mul_(2)
    assert torch.equal(split_of(projection), split_projection(projection))
