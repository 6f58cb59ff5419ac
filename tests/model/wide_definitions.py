"""The definitions of operations summed in float64, so that neither batch nor row shows in any bit.

What PyTorch's float32 functions give a row on a processor depends on the rows beside it; a difference that is
left between two ways to compute a token is then one of wiring.
"""

import torch
from torch.nn import functional as F

import model.decode
import model.flat
from model.layers.top_k import top_k_lowest_index
from model.ops.candidates import reference as candidates
from model.ops.engram_gate import reference as gate
from model.ops.experts import reference as experts
from model.ops.hyper_boundary import reference as boundary
from model.ops.index_decode import reference as index_decode
from model.ops.indexer import reference as indexer
from model.ops.sparse_attention import reference as attention
from model.ops.sparse_decode import reference as decode

_attend, _norm, _promoted = attention.attend, F.rms_norm, torch.promote_types


def _rms_norm(x, shape, weight, eps):
    return _norm(x.double(), shape, weight.double(), eps).to(x.dtype)


def _promote(first, second):
    found = _promoted(first, second)
    return torch.float64 if found is torch.float32 else found


def _angles(positions, frequencies):
    angle = (positions.to(torch.float32).unsqueeze(-1) * frequencies).double()
    return angle.cos().float(), angle.sin().float()


def _attention(query, keys, visible, sink, scale):
    out, lse = _attend(query.double(), keys.double(), visible, sink.double(), scale)
    return out.float(), lse.float()


def _scores(query, keys, weights):
    dots = torch.einsum("thd,sd->ths", query.double(), keys.double())
    return (torch.relu(dots) * weights.double()[:, :, None]).sum(1).float()


def _input(streams, coefficient, norm, eps):
    x = torch.einsum("ts,tsd->td", coefficient[:, :4].double(), streams.double()).to(streams.dtype).double()
    normed = x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps) * norm.double()
    return normed.to(streams.dtype), streams.double().square().sum((1, 2)).float()


def _update(streams, branch, coefficient, norm, eps):
    _, c, mix = coefficient.double().split([4, 4, 16], 1)
    mixed = torch.einsum("tio,tid->tod", mix.unflatten(1, (4, 4)), streams.double())
    updated = (c[:, :, None] * branch.double()[:, None] + mixed).to(streams.dtype)
    return updated, *_input(updated, coefficient, norm, eps)


def _swiglu(hidden, weights, plan, limit):
    up_gate, up = hidden.double().chunk(2, -1)
    product = F.silu(up_gate.clamp(max=limit)) * up.clamp(-limit, limit)
    every = F.pad(weights, (0, plan.place.shape[1] - weights.shape[1]), value=1.0).flatten()
    return (product * torch.empty_like(every).index_copy(0, plan.place.flatten().long(), every)[:, None]).to(
        hidden.dtype
    )


def _route(x, weight, bias, chosen, factor, temperature, forced):
    logits = x.double() @ weight.double().T / temperature
    affinity = F.softplus(logits.clamp_min(-80.0)).sqrt().float()
    ids = experts.force(top_k_lowest_index(affinity + bias, chosen), forced)
    weights = affinity.gather(1, ids).double()
    weights = weights / weights.sum(-1, keepdim=True) * factor
    return affinity, ids, weights.float(), experts.block_loads(ids, len(weight))


def put(patch) -> None:
    """Replace the definitions while `patch` (pytest's monkeypatch) lasts."""
    patch.setattr(F, "rms_norm", _rms_norm)
    patch.setattr(torch, "promote_types", _promote)
    patch.setattr(gate, "_wide", lambda x: x.double())
    for module in (model.flat, model.decode):
        patch.setattr(module, "cosine_and_sine", _angles)
    for module in (attention, decode):
        patch.setattr(module, "attend", _attention)
    for module in (indexer, index_decode, candidates):
        patch.setattr(module, "index_scores", _scores)
    for name, function in (("site_input", _input), ("update", _update)):
        patch.setattr(boundary, name, function)
    for name, function in (("swiglu", _swiglu), ("route", _route)):
        patch.setattr(experts, name, function)
