"""A policy whose experts are packed in FP4 equals the one that holds the same values unpacked."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from model.checkpoint import load_policy, save_policy
from model.layers.moe import MixtureOfExperts
from model.ops import dispatch
from model.policy import PackedTokens, Policy
from model.presets import NANO, NANO_DRAFT, OFFICIAL
from model.quant.weights import decode_fp4, encode_fp4
from tests.model.test_fused import CONFIG


@torch.no_grad()
def _pair(config) -> tuple[Policy, Policy]:
    """Unpacked with values that FP4 holds, and packed."""
    policy = Policy(config).eval()
    for block in policy.blocks:
        for stack in (block.ffn.w13, block.ffn.w2):
            for matrix in stack[: block.ffn.experts]:
                matrix.copy_(decode_fp4(*encode_fp4(matrix)))
    packed = deepcopy(policy)
    packed.pack_experts()
    return policy, packed


def _tokens(lengths=(5, 37, 18)):
    ids = torch.randint(0, 64, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    return PackedTokens(ids, torch.tensor([0, *lengths]).cumsum(0))


def _decoded(policy: Policy, steps: int = 4) -> torch.Tensor:
    policy.fake_quant = True
    cache = policy.new_cache(2, 128, storage="packed")
    slots = torch.tensor([cache.allocate() for _ in range(2)])
    ids = torch.randint(0, 64, (2, 40 + steps), generator=torch.Generator().manual_seed(1))
    found = [policy.extend(cache, slots, ids[:, :40], torch.tensor([40, 31]))]
    for step in range(40, 40 + steps):
        found.append(policy.extend(cache, slots, ids[:, step, None], torch.ones(2, dtype=torch.int64)))
    return torch.stack(found)


@torch.no_grad()
def test_a_packed_policy_gives_the_same_bits():
    policy, packed = _pair(CONFIG)
    assert torch.equal(packed(_tokens()).hidden, policy(_tokens()).hidden)
    with dispatch.fused_everywhere():
        assert torch.equal(packed(_tokens()).hidden, policy(_tokens()).hidden)
        assert dispatch.paths()["packed_experts"] == "reference"
        assert torch.equal(_decoded(packed), _decoded(policy))


@torch.no_grad()
def test_a_packed_policy_in_float32_is_near():
    policy, packed = _pair(replace(NANO, n_routed_experts=12))
    torch.testing.assert_close(packed(_tokens()).hidden, policy(_tokens()).hidden)


@torch.no_grad()
def test_inputs_of_packed_experts_are_rounded_where_the_policy_says_so():
    policy, packed = _pair(replace(CONFIG, quantization=OFFICIAL.quantization))
    with dispatch.fused_everywhere():
        assert torch.equal(packed(_tokens()).hidden, policy(_tokens()).hidden)


def test_packing_takes_half_a_byte_a_weight():
    policy, packed = _pair(CONFIG)
    moe, before = packed.blocks[0].ffn, policy.blocks[0].ffn
    weights = sum(stack[: before.experts].numel() for stack in (before.w13, before.w2))
    held = sum(b.nbytes for n, b in moe.named_buffers() if n.endswith(("codes", "scales")))
    assert held == weights * 17 / 32
    assert not any("w13" in name or "w2" in name for name, _ in moe.named_parameters())


def test_training_packed_experts_is_refused():
    _, packed = _pair(CONFIG)
    with pytest.raises(RuntimeError, match="inference alone"):
        packed(_tokens())
    with dispatch.fused_everywhere(), pytest.raises(RuntimeError, match="inference alone"):
        packed(_tokens())


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match="multiples of 32"):
        Policy(replace(CONFIG, moe_intermediate_size=48)).pack_experts()
    policy = Policy(CONFIG)
    with torch.no_grad():
        policy.blocks[1].ffn.w2[2, 5, 7] = 1e5
    with pytest.raises(ValueError, match="cannot be packed"):
        policy.pack_experts()


@torch.no_grad()
def test_a_checkpoint_in_fp4_is_kept_packed(tmp_path):
    config = replace(CONFIG, quantization=OFFICIAL.quantization, n_shared_experts=2)
    save_policy(Policy(config), tmp_path / "first")
    plain = load_policy(tmp_path / "first")
    packed = load_policy(tmp_path / "first", experts="packed")
    moe = packed.blocks[1].ffn
    assert not hasattr(moe, "w13") and torch.equal(moe.packed.w2.matrix(3), plain.blocks[1].ffn.w2[3])
    with dispatch.fused_everywhere():
        assert torch.equal(packed(_tokens()).hidden, plain(_tokens()).hidden)
    save_policy(packed, tmp_path / "second")
    again = load_policy(tmp_path / "second")
    assert all(torch.equal(again.state_dict()[name], value) for name, value in plain.state_dict().items())


def test_a_drafter_is_kept_packed_too(tmp_path):
    config = replace(NANO_DRAFT, quantization=OFFICIAL.quantization, dtype="bfloat16")
    save_policy(Policy(config), tmp_path)
    plain, packed = load_policy(tmp_path), load_policy(tmp_path, experts="packed")
    found = [module for module in packed.modules() if isinstance(module, MixtureOfExperts)]
    expected = [module for module in plain.modules() if isinstance(module, MixtureOfExperts)]
    assert len(found) == 9
    for moe, before in zip(found, expected, strict=True):
        for expert in range(before.experts + before.shared):
            assert torch.equal(moe.packed.w13.matrix(expert), before.w13[expert])


def test_experts_that_are_not_stored_in_fp4_are_not_kept_packed(tmp_path):
    save_policy(Policy(CONFIG), tmp_path)
    with pytest.raises(ValueError, match="stores experts in FP4"):
        load_policy(tmp_path, experts="packed")
    policy = load_policy(tmp_path)
    policy.pack_experts()
    with pytest.raises(ValueError, match="quantization says fp4"):
        save_policy(policy, tmp_path / "again")
    save_policy(policy, tmp_path / "again", stored=replace(CONFIG, quantization=OFFICIAL.quantization))
    assert load_policy(tmp_path / "again", experts="packed").blocks[0].ffn.packed is not None
