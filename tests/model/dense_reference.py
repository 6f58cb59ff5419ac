"""The policy once more, slowly: one document, plain autograd, selections as masks. Only for comparison."""

import torch
from torch.nn import functional as F

from model.config import AttentionMode
from model.layers.engram_hash import look_back
from model.quant.blocks import round_index, round_main, round_window


def rms(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def ste(x, rounding, active):
    return x + (rounding(x) - x).detach() if active else x


def turn(x, positions, frequencies, sign=1.0):
    angle = positions.float()[:, None] * frequencies * sign
    while angle.dim() < x.dim():
        angle = angle.unsqueeze(1)
    width = 2 * angle.shape[-1]
    kept, even, odd = x[..., :-width], x[..., -width::2], x[..., -width + 1 :: 2]
    pairs = torch.stack([even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1)
    return torch.cat([kept, pairs.flatten(-2)], -1)


class DenseReference:
    """Forward of one document [T] with the parameters of `policy`."""

    def __init__(self, policy):
        self.policy, self.config = policy, policy.config

    def logits(self, ids):
        config, policy = self.config, self.policy
        eps = config.rms_norm_eps
        streams = policy.embed.weight[ids].unsqueeze(1).repeat(1, config.hc_mult, 1)
        weights = torch.zeros(len(ids), config.hc_mult, dtype=streams.dtype)
        weights[:, 0] = 1
        shared = {}
        rows = self.engram_rows(ids)
        for block in policy.blocks:
            if block.engram is not None:
                streams = self.engram(block, streams, rows[:, block.engram_column])
            for norm, site, inner in (
                (block.attn_norm, block.hc_attn, lambda x, b=block: self.attention(b.attn, x, shared)),
                (block.ffn_norm, block.hc_ffn, lambda x, b=block: self.experts(b.ffn, x)),
            ):
                pre, post, carry = self.coefficients(site, streams)
                update = inner(rms((weights[..., None] * streams).sum(1), norm.weight, eps))
                streams = torch.einsum("tio,tid->tod", carry, streams) + post[..., None] * update[:, None]
                weights = pre
        hidden = rms((weights[..., None] * streams).sum(1), policy.norm.weight, eps)
        return hidden @ policy.head.weight.T

    def engram_rows(self, ids):
        config, policy = self.config, self.policy
        pad = policy.token_map[config.engram_pad_token_id]
        mapped = torch.cat([pad.repeat(config.engram_max_ngram_size - 1), policy.token_map[ids]])
        history = torch.stack([mapped[t : t + config.engram_max_ngram_size].flip(0) for t in range(len(ids))])
        return policy.engram_hash(look_back(history, pad))

    def engram(self, block, streams, rows):
        engram, d = block.engram, self.config.hidden_size
        projected = engram.embed.weight[rows].flatten(1) @ engram.wkv.weight.T
        keys, value = projected[:, :-d].unflatten(1, (-1, d)), projected[:, -d:]
        eps = self.config.rms_norm_eps
        dot = (rms(streams, engram.q_weight, eps) * rms(keys, engram.k_weight, eps)).sum(-1) * d**-0.5
        gate = torch.sigmoid(torch.sign(dot) * dot.abs().clamp_min(1e-6).sqrt())
        return streams + gate[..., None] * value[:, None]

    def coefficients(self, site, streams):
        config = self.config
        n, eps = config.hc_mult, config.hc_eps
        flat = streams.flatten(1)
        mixes = (flat @ site.fn.T) * torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
        pre = torch.sigmoid(mixes[:, :n] * site.scale[0] + site.base[:n]) + eps
        post = 2 * torch.sigmoid(mixes[:, n : 2 * n] * site.scale[1] + site.base[n : 2 * n])
        matrix = (mixes[:, 2 * n :] * site.scale[2] + site.base[2 * n :]).unflatten(1, (n, n)).softmax(
            -1
        ) + eps
        matrix = matrix / (matrix.sum(1, keepdim=True) + eps)
        for _ in range(config.hc_sinkhorn_iters - 1):
            matrix = matrix / (matrix.sum(2, keepdim=True) + eps)
            matrix = matrix / (matrix.sum(1, keepdim=True) + eps)
        return pre, post, matrix

    def experts(self, ffn, x):
        config, gate = self.config, ffn.gate
        affinity = F.softplus(x @ gate.weight.T / config.gate_temp).sqrt()
        chosen = (affinity.detach() + gate.bias).topk(config.num_experts_per_tok).indices
        weights = affinity.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
        result = 0
        for expert in range(len(ffn.w13)):
            weight = (weights * (chosen == expert)).sum(-1, keepdim=True) if expert < ffn.experts else 1.0
            up_gate, up = (x @ ffn.w13[expert].T).chunk(2, -1)
            limit = config.swiglu_limit
            result = (
                result
                + (F.silu(up_gate.clamp(max=limit)) * up.clamp(-limit, limit) * weight) @ ffn.w2[expert].T
            )
        return result

    def attention(self, attn, x, shared):
        config, quant = self.config, self.policy.fake_quant
        time, eps = len(x), config.rms_norm_eps
        at = torch.arange(time)
        latent = rms(x @ attn.wq_a.weight.T, attn.q_norm.weight, eps)
        query = turn((latent @ attn.wq_b.weight.T).unflatten(1, (attn.heads, -1)), at, attn.frequencies)
        keys = ste(
            turn(rms(x @ attn.wkv.weight.T, attn.kv_norm.weight, eps), at, attn.frequencies),
            round_window,
            quant,
        )
        seen = (at[:, None] >= at) & (at[:, None] - at < config.sliding_window)
        if attn.ratio:
            if attn.mode is AttentionMode.FULL:
                self.compress(attn, x, shared)
            if attn.mode is not AttentionMode.REUSE:
                self.choose(attn, x.detach(), latent.detach(), shared)
            keys, seen = torch.cat([keys, shared["main"]]), torch.cat([seen, shared["chosen"]], 1)
        scores = torch.einsum("thc,sc->ths", query, keys) * config.head_dim**-0.5
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        sink = attn.attn_sink[None, :, None].expand(time, -1, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        output = turn(torch.einsum("ths,sc->thc", weights, keys), at, attn.frequencies, -1.0)
        grouped = output.flatten(1).unflatten(1, (attn.groups, -1))
        weight = attn.wo_a.weight.unflatten(0, (attn.groups, -1))
        return torch.einsum("tgi,goi->tgo", grouped, weight).flatten(1) @ attn.wo_b.weight.T

    def compress(self, attn, x, shared):
        config, quant, m = self.config, self.policy.fake_quant, attn.ratio
        whole = len(x) // m * m
        values = (x @ attn.compressor.wkv.weight.T)[:whole].unflatten(0, (-1, m))
        if m > 1:
            gates = (x @ attn.compressor.wgate.weight.T)[:whole].unflatten(0, (-1, m))
            values = values * gates.softmax(1)
        latent = rms(values.sum(1), attn.compressor.norm.weight, config.rms_norm_eps)
        at = torch.arange(len(latent)) * m
        shared["main"] = ste(turn(latent, at, attn.frequencies), round_main, quant)
        indexer = attn.indexer
        keys = rms(latent.detach() @ indexer.wk.weight.T, indexer.k_norm.weight, config.rms_norm_eps)
        shared["index"] = ste(turn(keys, at, attn.frequencies), round_index, quant)
        shared["candidates"] = None

    def choose(self, attn, x, latent, shared):
        config, indexer, keys = self.config, attn.indexer, shared["index"]
        at = torch.arange(len(x))
        heads = (latent @ indexer.wq_b.weight.T).unflatten(1, (indexer.heads, -1))
        heads = ste(turn(heads, at, attn.frequencies), round_index, self.policy.fake_quant)
        weights = x @ indexer.weights_proj.weight.T * (indexer.width * indexer.heads) ** -0.5
        scores = torch.einsum("th,ths->ts", weights, torch.einsum("thc,sc->ths", heads, keys).relu()).detach()
        visible = (at + 1) // attn.ratio
        scores = scores.masked_fill(torch.arange(len(keys)) >= visible[:, None], -torch.inf)
        if attn.layer == config.candidate_source_layer_id:
            shared["candidates"] = self.candidates(scores, visible)
        elif attn.restricted and shared["candidates"] is not None:
            scores = scores.masked_fill(~shared["candidates"], -torch.inf)
        best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : config.index_topk]
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True) & (scores > -torch.inf)
        shared["chosen"] = chosen

    def candidates(self, scores, visible):
        size, width = self.config.candidate_block_size, scores.shape[1]
        blocks = torch.stack([scores[:, j : j + size].amax(-1) for j in range(0, width, size)], 1)
        newest = torch.div(visible - 1, size, rounding_mode="floor")[:, None]
        blocks = blocks.masked_fill(torch.arange(blocks.shape[1]) == newest, torch.inf)
        best = blocks.sort(dim=-1, descending=True, stable=True).indices[
            :, : self.config.candidate_topk_blocks
        ]
        kept = torch.zeros_like(blocks, dtype=torch.bool).scatter(1, best, True) & (blocks > -torch.inf)
        return kept.repeat_interleave(size, 1)[:, :width]
