"""Models of transformers as policies: packed, cached, published, stored as the unchanged model is."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, MistralConfig

from model.batch import PackedTokens
from model.cache.policy_cache import CacheFull
from model.chat import nano_chat
from model.checkpoint_files import CheckpointError, MissingTensor
from model.hf.attention import buckets
from model.hf.folder import is_hf_folder, open_hf, save_hf
from model.hf.policy import HFPolicy
from model.hf.settings import HFPolicyError, LoraSettings
from model.hf.tiny import tiny_model
from model.hf.weights import published
from model.policies import open_policy, write_policy

SMALL = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LENGTHS = (7, 40, 1, 90, 13)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def fresh(config, seed=0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


MODELS = {
    "dense": lambda: tiny_model("hf_tiny", 0),
    "experts": lambda: tiny_model("hf_tiny_moe", 0),
    "llama": lambda: fresh(LlamaConfig(**SMALL, tie_word_embeddings=False)),
    "windows": lambda: fresh(MistralConfig(**SMALL, sliding_window=8)),
}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


def ids_of(lengths=LENGTHS, seed=0):
    return torch.randint(3, 60, (sum(lengths),), generator=torch.Generator().manual_seed(seed))


def packed(ids, lengths):
    return PackedTokens(ids, torch.tensor([0, *lengths]).cumsum(0))


def test_packed_documents_are_what_the_model_says_of_each_alone(model):
    ids = ids_of()
    with torch.no_grad():
        theirs = [model(input_ids=part[None]).logits[0] for part in ids.split(LENGTHS)]
        policy = HFPolicy(model)
        ours = policy.logits(policy(packed(ids, LENGTHS)).hidden)
    torch.testing.assert_close(ours, torch.cat(theirs), atol=2e-5, rtol=1e-4)


def test_no_gradient_crosses_a_documents_start(model):
    policy = HFPolicy(model)
    embedding = policy.model.get_input_embeddings()
    seen = []
    embedding.register_forward_hook(
        lambda m, i, o: seen.append(o.requires_grad_(True)) or seen[-1].retain_grad()
    )
    output = policy(packed(ids_of(), LENGTHS)).hidden
    output[7:47].square().sum().backward()
    touched = seen[0].grad[0].abs().sum(-1) > 0
    assert touched.nonzero()[:, 0].tolist() == list(range(7, 47))


def test_a_cache_goes_on_as_the_whole_document(model):
    policy, ids = HFPolicy(model), ids_of()
    whole = policy(packed(ids, LENGTHS)).hidden
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    cache = policy.new_cache(8, 96)
    with torch.inference_mode():
        for _ in range(2):  # slots that were used before
            slot = cache.allocate()
            policy.extend(cache, torch.tensor([slot]), ids[None, :50], torch.tensor([50]))
            cache.free(slot)
        slots = {document: cache.allocate() for document in (1, 3, 4)}
        for first, last in ((0, 5), (5, 6), (6, 13), (13, 40)):
            rows = [d for d in slots if LENGTHS[d] > first]
            counts = [min(last, LENGTHS[d]) - first for d in rows]
            tokens = torch.zeros(len(rows), max(counts), dtype=torch.int64)
            for row, (d, n) in enumerate(zip(rows, counts, strict=True)):
                tokens[row, :n] = ids[starts[d] + first : starts[d] + first + n]
            hidden = policy.extend(
                cache, torch.tensor([slots[d] for d in rows]), tokens, torch.tensor(counts)
            )
            for row, (d, n) in enumerate(zip(rows, counts, strict=True)):
                torch.testing.assert_close(
                    hidden[row], whole[starts[d] + first + n - 1].detach(), atol=2e-5, rtol=1e-4
                )


def test_slots_fork_and_travel():
    policy, ids = HFPolicy(tiny_model("hf_tiny", 0)), ids_of()
    cache, other = policy.new_cache(4, 32), policy.new_cache(2, 32)
    with torch.inference_mode():
        slot = cache.allocate()
        policy.extend(cache, torch.tensor([slot]), ids[None, :9], torch.tensor([9]))
        copy, moved = cache.fork(slot), other.import_slot(cache.export_slot(slot))
        told = [
            policy.extend(store, torch.tensor([at]), ids[None, 9:11], torch.tensor([2]))
            for store, at in ((cache, slot), (cache, copy), (other, moved))
        ]
        assert torch.equal(told[0], told[1])
        assert torch.equal(told[0], told[2])
        with pytest.raises(CacheFull, match="room for 32"):
            policy.extend(cache, torch.tensor([slot]), ids[None, :30], torch.tensor([30]))
        assert cache.length(slot) == 11
        state = cache.export_slot(slot)
        state.pop(next(name for name in state if name.endswith("0.k")))
        with pytest.raises(ValueError, match="other layers"):
            other.import_slot(state)


def test_buckets_hold_like_lengths():
    found = buckets([3, 100, 80, 5, 400, 390])
    assert sorted(i for bucket in found for i in bucket) == list(range(6))
    assert [sorted(bucket) for bucket in found] == [[4, 5], [1, 2], [0, 3]]


def test_recomputed_activations_give_the_same_gradients(model):
    policy, gradients, runs_of_layer = HFPolicy(model), [], []
    layer = policy.model.get_decoder().layers[0].self_attn
    layer.register_forward_hook(lambda *_: runs_of_layer.append(1))
    for recompute in (False, True):
        policy.set_recompute(recompute)
        policy.zero_grad()
        policy(packed(ids_of(), LENGTHS)).hidden.square().sum().backward()
        gradients.append(
            {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
        )
    assert runs_of_layer == [1, 1, 1]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SMALL, head_dim=12, attn_logit_softcapping=0.1, final_logit_softcapping=None),
        Gemma2Config(**SMALL, head_dim=12, attn_logit_softcapping=None, final_logit_softcapping=0.1),
    ],
    ids=["scores", "logits"],
)
def test_a_model_that_does_more_than_we_reproduce_is_refused(config):
    with pytest.raises(HFPolicyError, match="Gemma2"):
        HFPolicy(fresh(config))


def test_an_older_architecture_works_or_is_refused_by_name():
    config = GPT2Config(
        vocab_size=64, n_embd=48, n_layer=2, n_head=4, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0
    )
    model = fresh(config)
    ids = ids_of()
    theirs = torch.cat([model(input_ids=part[None]).logits[0] for part in ids.split(LENGTHS)])
    policy = HFPolicy(model)
    ours = policy.logits(policy(packed(ids, LENGTHS)).hidden)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("setting", "value"), [("fake_quant", True), ("exact", True)], ids=["rounding", "exact"]
)
def test_what_the_policy_lacks_is_refused(setting, value):
    policy = HFPolicy(tiny_model("hf_tiny", 0))
    with pytest.raises(HFPolicyError, match="policy=hf"):
        setattr(policy, setting, value)
    setattr(policy, setting, False)
    with pytest.raises(HFPolicyError, match=r"engine\.storage=dense"):
        policy.new_cache(1, 8, storage="packed")


def test_published_names_are_those_of_the_librarys_files(model, tmp_path):
    policy = HFPolicy(model)
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    theirs, ours = load_file(tmp_path / "model.safetensors"), published(policy)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def test_a_saved_policy_is_read_by_the_library_and_by_us(model, tmp_path):
    policy, ids = HFPolicy(model), ids_of()
    expected = policy(packed(ids, LENGTHS)).hidden
    write_policy(policy, tmp_path, nano_chat())
    assert is_hf_folder(tmp_path)
    read = open_policy(tmp_path)
    assert isinstance(read, HFPolicy)
    assert torch.equal(read(packed(ids, LENGTHS)).hidden, expected)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    theirs = plain(input_ids=ids[None, :7]).logits[0]
    torch.testing.assert_close(policy.logits(expected[:7]), theirs, atol=2e-5, rtol=1e-4)


def test_a_damaged_folder_says_what_is_wrong(tmp_path):
    policy = HFPolicy(MODELS["llama"]())
    state = published(policy)
    write_policy(policy, tmp_path, nano_chat())
    from safetensors.torch import save_file

    weights = next(tmp_path.glob("*.safetensors"))
    state.pop("lm_head.weight")
    save_file(state, weights, metadata={"format": "pt"})
    (tmp_path / "model.safetensors.index.json").unlink()
    weights.rename(tmp_path / "model.safetensors")
    with pytest.raises(MissingTensor, match="lm_head"):
        open_hf(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_hf(tmp_path)
    assert not is_hf_folder(tmp_path / "elsewhere")


def test_code_and_pickles_of_a_folder_are_not_run(base, tmp_path):
    ran = tmp_path / "ran"
    described = json.loads((base / "config.json").read_text())
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (base / "own.py").write_text(f"open({str(ran)!r}, 'w')")
    (base / "config.json").write_text(json.dumps({**described, **own}))
    with pytest.raises(CheckpointError, match="trust_remote_code"):
        open_hf(base)
    (base / "config.json").write_text(json.dumps(described))
    state = open_hf(base).model.state_dict()
    for file in base.glob("*.safetensors*"):
        file.unlink()
    torch.save(state, base / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="safetensors"):
        open_hf(base)
    assert not ran.exists()


def test_states_are_loaded_and_assigned():
    one, two = (HFPolicy(tiny_model("hf_tiny", seed)) for seed in (0, 1))
    two.load_state_dict(one.state_dict())
    ids = ids_of()
    assert torch.equal(one(packed(ids, LENGTHS)).hidden, two(packed(ids, LENGTHS)).hidden)
    three = HFPolicy(tiny_model("hf_tiny", 2))
    three.load_state_dict(one.state_dict(), assign=True)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.mul_(1.5)
    assert torch.equal(one.logits(torch.ones(1, 128)), three.logits(torch.ones(1, 128)))
    assert torch.equal(one(packed(ids, LENGTHS)).hidden, three(packed(ids, LENGTHS)).hidden)
    with pytest.raises(HFPolicyError, match="1 names differ"):
        one.load_state_dict({**two.state_dict(), "more": torch.zeros(1)})


@pytest.fixture
def base(tmp_path):
    save_hf(HFPolicy(tiny_model("hf_tiny", 0)), tmp_path / "base", nano_chat())
    return tmp_path / "base"


def test_adapters_begin_at_nothing_and_are_all_that_is_trained(base):
    plain, policy = open_hf(base), open_hf(base, lora=LoraSettings(rank=3, targets=("q_proj", "up_proj")))
    ids = ids_of()
    before = policy(packed(ids, LENGTHS)).hidden
    torch.testing.assert_close(before, plain(packed(ids, LENGTHS)).hidden)
    before.square().sum().backward()
    names = {name for name, p in policy.model.named_parameters() if p.grad is not None}
    assert names
    assert all("lora_" in name for name in names)
    assert len(policy.state_dict()) == len(dict(policy.named_parameters())) == 2 * 2 * 3
    assert all(name.endswith(("lora_A.weight", "lora_B.weight")) for name in policy.state_dict())


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters_are_stored_alone_and_published_merged(base, tmp_path):
    policy = open_hf(base, lora=LoraSettings(rank=4, alpha=8.0, seed=3))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    ids = ids_of()
    expected = policy(packed(ids, LENGTHS)).hidden
    write_policy(policy, tmp_path / "adapters", nano_chat())
    assert not list((tmp_path / "adapters").glob("model*.safetensors"))
    described = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(base)
    read = open_policy(tmp_path / "adapters")
    torch.testing.assert_close(read(packed(ids, LENGTHS)).hidden, expected)
    save_hf(policy, tmp_path / "merged", nano_chat())
    merged = open_policy(tmp_path / "merged")
    torch.testing.assert_close(merged(packed(ids, LENGTHS)).hidden, expected, atol=1e-4, rtol=1e-4)
    from peft import PeftModel

    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapters")
    logits = theirs(input_ids=ids[None, :7]).logits[0]
    torch.testing.assert_close(policy.logits(expected[:7]), logits, atol=1e-4, rtol=1e-4)


def test_adapters_without_their_model_say_so(base, tmp_path):
    policy = open_hf(base, lora=LoraSettings(rank=2))
    write_policy(policy, tmp_path / "adapters", nano_chat())
    (base / "config.json").rename(base / "gone.json")
    with pytest.raises(CheckpointError, match="which is not there"):
        open_policy(tmp_path / "adapters")
    with pytest.raises(HFPolicyError, match="targets"):
        HFPolicy(tiny_model("hf_tiny", 0), LoraSettings(targets=("nonesuch",)))
