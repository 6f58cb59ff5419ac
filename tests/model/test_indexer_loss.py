import pytest
import torch
from torch.nn import functional as F

from model.policy import PackedTokens

INDEXER = "indexer"


def tokens(lengths=(44, 30, 45)):
    ids = torch.randint(0, 64, (sum(lengths),), generator=torch.Generator().manual_seed(2))
    return PackedTokens(ids, torch.tensor([0, *lengths]).cumsum(0))


def test_without_the_loss_the_indexer_gets_no_gradient(nano):
    output = nano(tokens())
    assert output.aux.indexer_loss is None
    nano.logits(output.hidden).square().mean().backward()
    assert all(p.grad is None for name, p in nano.named_parameters() if INDEXER in name)


@pytest.mark.parametrize("variant", ["sparse", "dense"])
@pytest.mark.parametrize("name", ["nano", "three_sources"])
def test_the_loss_reaches_every_indexer_and_nothing_else(request, name, variant):
    policy = request.getfixturevalue(name)
    policy(tokens(), indexer_loss=variant).aux.indexer_loss.backward()
    for name, parameter in policy.named_parameters():
        if INDEXER in name:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
        else:
            assert parameter.grad is None or not parameter.grad.any(), name


@pytest.mark.parametrize("variant", ["sparse", "dense"])
def test_the_loss_is_the_divergence_of_attention_from_scores(nano, variant):
    """Recomputed from the traced selection and scores, token by token, for layer 1 of one document."""
    from model.batch import Trace

    document = tokens((40,))
    trace = Trace()
    layer = nano.blocks[1].attn
    seen = {}
    layer.register_forward_hook(lambda module, inputs, output: seen.update(x=inputs[0], shared=output[1]))
    with torch.no_grad():
        total = nano(document, indexer_loss=variant, trace=trace).aux.indexer_loss
    expected = _layer_one(
        nano, seen["x"], seen["shared"][0], trace.values["layers.1.index_scores"][0], variant
    )
    others = [block for block in nano.blocks if hasattr(block.attn, "indexer") and block.layer != 1]
    assert len(others) == 2
    only = _only_layer(nano, document, variant, 1)
    assert only == pytest.approx(expected, rel=1e-4)
    assert total >= only


def _only_layer(policy, document, variant, layer):
    from model.batch import Batch
    from model.layers.attention import RunOptions
    from model.layers.indexer_loss import Supervision

    supervision = Supervision(variant)
    batch = Batch.of_documents(document, policy.config.sliding_window)
    options = RunOptions(False, 1024, supervision)
    with torch.no_grad():
        policy._run(
            policy._embed(document.token_ids, None),
            batch,
            policy._document_engram(document.token_ids, batch),
            None,
            options,
        )
    return float(supervision.sums[layer] / supervision.counts[layer])


@torch.no_grad()
def _layer_one(policy, x, shared, scores, variant):
    attn, config = policy.blocks[1].attn, policy.config
    from model.layers.rope import Rotation, rotate

    at = torch.arange(len(x))
    turn = Rotation.at(at, attn.frequencies)
    query = attn.wq_b(attn.q_norm(attn.wq_a(x))).unflatten(-1, (config.num_attention_heads, -1))
    query = rotate(query, turn.per_head())
    window = rotate(attn.kv_norm(attn.wkv(x)), turn)
    main, losses = shared.main.dense()[0], []
    for t in range(len(x)):
        chosen = [j for j in shared.selection.listed(t, t + 1)[0, 0].tolist() if j >= 0]
        if variant == "dense":
            chosen = list(range((t + 1) // 2))
        if not chosen:
            continue
        keys = torch.cat([window[max(0, t - config.sliding_window + 1) : t + 1], main[chosen]])
        logits = torch.cat([query[t] @ keys.T * config.head_dim**-0.5, attn.attn_sink[:, None]], 1)
        mass = logits.softmax(-1)[:, -1 - len(chosen) : -1].sum(0)
        teacher = mass / mass.sum()
        losses.append(float(F.kl_div(scores[t, chosen].log_softmax(-1), teacher, reduction="sum")))
    return sum(losses) / len(losses)


def test_training_the_indexer_lowers_its_loss(nano):
    optimizer = torch.optim.Adam([p for name, p in nano.named_parameters() if INDEXER in name], lr=1e-2)
    losses = []
    for _ in range(6):
        loss = nano(tokens(), indexer_loss="dense").aux.indexer_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
