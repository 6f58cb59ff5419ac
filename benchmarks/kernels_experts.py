"""Rows of the kernels' benchmark for the mixture of experts, beside `torch._grouped_mm`."""

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import kernel_data as data
from benchmarks.kernel_timing import Row, error, timed
from benchmarks.kernels_steps import COPY_BANDWIDTH
from model.ops.experts import Plan, activated, combine, few_rows, grouped, plan_of
from model.ops.experts import reference as definition

CHOSEN, LIMIT = 6, 10.0
RATIOS = (1.0, 1.3, 1.6)


def choices(tokens: int, experts: int, chosen: int, uneven: float, device: str = "cuda") -> Tensor:
    """[T, k] distinct experts, popular as exp(uneven * normal): 0 is even on average."""
    liking = torch.randn(experts, device=device) * uneven
    noise = -torch.empty(tokens, experts, device=device).exponential_().log()
    return (liking + noise).topk(chosen, 1).indices


def exactly(rows: int, experts: int) -> Tensor:
    """[T, 6] choices that give each expert `rows` rows."""
    tokens = rows * experts // CHOSEN
    start = torch.arange(tokens, device="cuda") * CHOSEN
    return (start[:, None] + torch.arange(CHOSEN, device="cuda")) % experts


def matrices(experts: int, height: int, width: int) -> Tensor:
    """[G, N, K] bf16."""
    return data.normal(experts, height, width, scale=width**-0.5)


def _wide(x: Tensor, weight: Tensor, plan: Plan, some: list[int]) -> tuple[Tensor, Tensor]:
    """Rows of some experts, and their products in fp64."""
    bounds = [0, *plan.ends.tolist()]
    at = torch.cat([torch.arange(bounds[g], bounds[g + 1], device="cuda") for g in some])
    parts = [x[bounds[g] : bounds[g + 1]].double() @ weight[g].double().T for g in some]
    return at, torch.cat(parts)


def _peer(x: Tensor, weight: Tensor, plan: Plan) -> Tensor:
    return torch._grouped_mm(x, weight.transpose(1, 2), offs=plan.ends)  # pyright: ignore


def experts_products() -> list[Row]:
    """Products alone at official and at smaller shapes, forward and both gradients, even and uneven loads."""
    rows = []
    for experts, height, width in ((96, 4608, 5120), (96, 5120, 2304), (96, 1024, 2048)):
        weight = matrices(experts, height, width)
        for load in (128, 512):
            for uneven in (0.0, 0.6):
                ids = exactly(load, experts)
                if uneven:
                    ids = choices(len(ids), experts, CHOSEN, uneven)
                plan = plan_of(ids, experts, 0)
                x = data.normal(len(plan.tokens), width)
                with torch.no_grad():
                    out = grouped(x, weight, plan)
                    at, expected = _wide(x, weight, plan, [0, experts // 2, experts - 1])
                    worst = error(out[at], expected)
                    time = timed(lambda x=x, w=weight, p=plan: grouped(x, w, p))
                    peer = timed(lambda x=x, w=weight, p=plan: _peer(x, w, p))
                speed = 2 * x.numel() * height / time / 1e6
                kind = "uneven" if uneven else "each"
                rows.append(
                    Row(
                        f"{width} to {height} of {experts} experts, {load} rows {kind}",
                        peer / time,
                        "x",
                        time,
                        worst,
                        RATIOS,
                        "torch._grouped_mm",
                        peer,
                        f"{speed:.0f} TFLOP/s",
                    )
                )
                if load == 512 and not uneven:
                    rows += _gradients(x, weight, plan)
        del weight
    return rows


def _gradients(x: Tensor, weight: Tensor, plan: Plan) -> list[Row]:
    height, grad = weight.shape[1], data.normal(len(x), weight.shape[1])
    begin, end = plan.ends[2:4].tolist()
    part, rows = slice(begin, end), []
    for leaf, name in ((x, "input"), (weight, "weight")):
        # One at a time, lest the other's gradient be computed too.
        leaf.requires_grad_()
        runs = [
            lambda r=result, v=leaf: torch.autograd.grad(r, v, grad, retain_graph=True)[0]
            for result in (grouped(x, weight, plan), _peer(x, weight, plan))
        ]
        got = runs[0]()
        time, peer = (timed(run) for run in runs)
        leaf.requires_grad_(False)
        if name == "input":
            got, expected = got[part], grad[part].double() @ weight[3].double()
        else:
            got, expected = got[3], grad[part].double().T @ x[part].double()
        rows.append(
            Row(
                f"{name} gradient of the same",
                peer / time,
                "x",
                time,
                error(got, expected),
                None,
                "torch._grouped_mm",
                peer,
                f"{2 * x.numel() * height / time / 1e6:.0f} TFLOP/s",
            )
        )
    return rows


def _separately(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, plan: Plan) -> Tensor:
    """The peer of a whole site: gather, torch's products, activation and sum in PyTorch."""
    hidden = _peer(x.index_select(0, plan.tokens), w13, plan)
    return definition.combine(_peer(definition.swiglu(hidden, weights, plan, LIMIT), w2, plan), plan)


def _token(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """One token [d] through its experts and the shared one, in fp64."""
    total = x.new_zeros(len(x), dtype=torch.float64)
    for expert, weight in zip([*ids.tolist(), len(w13) - 1], [*weights.tolist(), 1.0], strict=True):
        gate, up = (w13[expert].double() @ x.double()).chunk(2)
        active = F.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT) * weight
        total += w2[expert].double() @ active
    return total


def experts_site() -> list[Row]:
    """Tokens through their experts and back at official widths, in prefill and in a decode step."""
    rows = []
    for tokens, experts in ((8192, 96), (64, 384)):
        ids = choices(tokens, experts, CHOSEN, 0.6 if tokens > 64 else 0.0)
        plan = plan_of(ids, experts, 1)
        x, weights = data.normal(tokens, 5120), torch.rand(tokens, CHOSEN, device="cuda")
        w13, w2 = matrices(experts + 1, 4608, 5120), matrices(experts + 1, 5120, 2304)

        def run(x=x, w13=w13, w2=w2, weights=weights, plan=plan) -> Tensor:
            with torch.no_grad():
                result = few_rows(x, w13, w2, weights, plan, limit=LIMIT)
                if result is None:
                    result = grouped(activated(x, w13, weights, plan, limit=LIMIT), w2, plan)
                return combine(result, plan)

        some = [0, tokens // 3, tokens - 1]
        expected = torch.stack([_token(x[t], w13, w2, weights[t], ids[t]) for t in some])
        worst = error(run()[some], expected)
        time = timed(run)
        peer = timed(lambda a=(x, w13, w2, weights, plan): _separately(*a))
        if tokens > 64:
            note = f"{6 * plan.tokens.numel() * 5120 * 2304 / time / 1e6:.0f} TFLOP/s"
        else:
            hit = len(ids.unique()) + 1
            size = hit * 3 * 5120 * 2304 * 2
            note = f"{hit} experts, {size / COPY_BANDWIDTH / time * 1e8:.0f} % of the copy bandwidth"
        rows.append(
            Row(
                f"tokens through experts, {tokens} tokens to 6 of {experts} and one shared",
                peer / time,
                "x",
                time,
                worst,
                None,
                "gather, torch._grouped_mm and eager activation",
                peer,
                note,
            )
        )
        del w13, w2
    return rows


def experts() -> list[Row]:
    """All of them."""
    return experts_products() + experts_site()
