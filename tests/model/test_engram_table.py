"""N-gram tables outside the accelerator: the same bits as a resident table, and gradients of touched rows."""

import json
import time
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from model.checkpoint import MissingTensor, WrongShape, load_policy, save_policy
from model.checkpoint_files import DamagedFile, ShardReader
from model.config import PolicyConfig
from model.layers.engram_table import EngramTable, MappedRows
from model.policy import PackedTokens, Policy

IDS = torch.arange(40) % 23
TOKENS = PackedTokens(IDS, torch.tensor([0, 25, 40]))


def checkpoint(folder, dtype):
    policy = Policy(replace(PolicyConfig.preset("nano"), dtype=dtype))
    save_policy(policy, folder)
    return folder


def tables(policy):
    return [block.engram.embed for block in policy.blocks if block.engram is not None]


def extended(policy):
    """Hidden states of a prefill in two chunks and of two decoded tokens."""
    cache = policy.new_cache(2, 64)
    slots = torch.tensor([cache.allocate(), cache.allocate()])
    ids = IDS.view(2, 20)
    out = []
    for begin, end in ((0, 7), (7, 18), (18, 19), (19, 20)):
        out.append(policy.extend(cache, slots, ids[:, begin:end], torch.full((2,), end - begin)))
    return torch.stack(out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("storage", ["host", "mmap"])
@torch.no_grad()
def test_the_results_are_those_of_a_resident_table_bit_for_bit(tmp_path, storage, dtype):
    folder = checkpoint(tmp_path, dtype)
    resident, other = load_policy(folder), load_policy(folder, tables=storage)
    assert torch.equal(resident(TOKENS).hidden, other(TOKENS).hidden)
    assert torch.equal(extended(resident), extended(other))
    for table in tables(other):
        assert table.traffic.lookups == table.traffic.prefetched == 5
        assert 0 <= table.traffic.hidden <= 1
        width = {"host": table.dtype.itemsize * 32, "mmap": 32 * 4 if dtype == "float32" else 32 + 1}[storage]
        assert table.traffic.bytes == 2 * len(IDS) * 6 * width
    assert all(table.traffic.lookups == 0 for table in tables(resident))


@torch.inference_mode()
def test_rows_of_an_engine_that_runs_in_inference_mode(tmp_path):
    folder = checkpoint(tmp_path, "float32")
    assert torch.equal(extended(load_policy(folder)), extended(load_policy(folder, tables="host")))


@torch.no_grad()
def test_rows_that_were_not_asked_for_are_gathered_at_once(tmp_path):
    table = EngramTable(50, 8, torch.float32, "host")
    table.weight.copy_(torch.randn(50, 8))
    asked = torch.tensor([[3, 4], [5, 6]])
    table.prefetch(asked)
    assert torch.equal(table(asked[1:]), table.weight[asked[1:]])
    assert torch.equal(table(asked), table.weight[asked])
    assert (table.traffic.lookups, table.traffic.prefetched) == (2, 0)


@torch.no_grad()
def test_gathering_is_hidden_behind_other_work():
    table = EngramTable(200_000, 64, torch.float32, "host")
    table.weight.normal_()
    ids = torch.randint(0, 200_000, (20_000, 6))
    table.prefetch(ids)
    time.sleep(1.0)
    rows = table(ids)
    assert torch.equal(rows, table.weight[ids])
    assert table.traffic.wait_seconds < table.traffic.gather_seconds and table.traffic.hidden > 0.5
    before = copy(table.traffic)
    table(ids)
    waited = table.traffic.wait_seconds - before.wait_seconds
    assert table.traffic.prefetched == 1
    assert waited >= table.traffic.gather_seconds - before.gather_seconds > 0


def test_an_error_of_the_background_reaches_the_caller():
    table = EngramTable(5, 8, torch.float32, "host")
    ids = torch.tensor([[7]])
    table.prefetch(ids)
    with pytest.raises(IndexError):
        table(ids)


def test_a_mapped_table_is_the_file_and_no_parameter(tmp_path):
    folder = checkpoint(tmp_path, "bfloat16")
    policy = load_policy(folder, tables="mmap")
    assert not any("engram.embed" in name for name in policy.state_dict())
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            ranges.append([int(part, 16) for part in line.split()[0].split("-")])
    for table in tables(policy):
        for part in (table.mapped.rows, table.mapped.scale):
            assert any(begin <= part.data_ptr() < end for begin, end in ranges)
    assert tables(policy)[0].mapped.rows.dtype is torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saving_a_policy_with_mapped_tables_writes_them_too(tmp_path, dtype):
    policy = load_policy(checkpoint(tmp_path / "a", dtype), tables="mmap")
    save_policy(policy, tmp_path / "b")
    save_policy(policy, tmp_path / "a")
    first, second = load_policy(tmp_path / "a"), load_policy(tmp_path / "b")
    assert first.state_dict().keys() == second.state_dict().keys() != policy.state_dict().keys()
    assert all(torch.equal(first.state_dict()[name], value) for name, value in second.state_dict().items())
    assert torch.equal(first(TOKENS).hidden, policy(TOKENS).hidden)


def test_what_cannot_be_mapped_says_why(tmp_path):
    policy = Policy(PolicyConfig.preset("nano"), tables="mmap")
    with pytest.raises(ValueError, match="load_policy"):
        policy(TOKENS)
    table = EngramTable(4, 32, torch.float32, "mmap")
    with pytest.raises(ValueError, match=r"\[5, 32\], not \[4, 32\]"):
        table.map_rows(MappedRows(torch.zeros(5, 32), None))
    with pytest.raises(ValueError, match="not mapped"):
        EngramTable(4, 32, torch.float32, "host").map_rows(MappedRows(torch.zeros(4, 32), None))
    with pytest.raises(ValueError, match="resident, host, mmap"):
        EngramTable(4, 32, torch.float32, "disk")  # pyright: ignore
    checkpoint(tmp_path, "float32")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    with pytest.raises(WrongShape, match="fp8"):
        load_policy(tmp_path, tables="mmap")
    with pytest.raises(MissingTensor, match="no tensor 'none'"):
        ShardReader.of_folder(tmp_path).map("none")


def test_a_tensor_at_an_odd_place_is_not_mapped(tmp_path):
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]},
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(5))
    with pytest.raises(DamagedFile, match="odd place"):
        ShardReader.of_folder(tmp_path).map("b")


def test_a_table_in_host_memory_stays_when_the_policy_moves():
    policy = Policy(PolicyConfig.preset("nano"), tables="host")
    policy.to("meta")
    assert policy.norm.weight.is_meta
    assert all(table.weight.device.type == "cpu" for table in tables(policy))


@pytest.mark.parametrize("storage", ["resident", "host"])
def test_gradients_are_the_touched_rows_of_the_dense_gradient(storage):
    table = EngramTable(1000, 8, torch.float32, storage)
    with torch.no_grad():
        table.weight.normal_()
    dense = table.weight.detach().clone().requires_grad_()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 50, (30, 6), generator=generator)
        factor = torch.randn(30, 6, 8, generator=generator)
        table.prefetch(ids)
        (table(ids) * factor).sum().backward()
        (F.embedding(ids, dense) * factor).sum().backward()
        grad = table.weight.grad
        assert grad.is_sparse and grad.coalesce().values().shape[0] <= 50
        assert torch.allclose(grad.to_dense(), dense.grad, atol=1e-5)


def test_training_makes_no_dense_gradient_of_a_table():
    policies = [Policy(PolicyConfig.preset("nano"), tables=storage) for storage in ("resident", "host")]
    for policy in policies:
        policy(TOKENS).hidden.square().sum().backward()
    for first, second in zip(*(tables(policy) for policy in policies), strict=True):
        ours, theirs = first.weight.grad.coalesce(), second.weight.grad.coalesce()
        assert torch.equal(ours.indices(), theirs.indices())
        assert torch.equal(ours.values(), theirs.values())
        assert 0 < ours.values().shape[0] < first.shape[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_host_tables_of_a_policy_on_an_accelerator(dtype):
    config = replace(PolicyConfig.preset("nano"), dtype=dtype)
    tokens = PackedTokens(IDS.cuda(), torch.tensor([0, 25, 40]).cuda())
    hidden = []
    for storage in ("resident", "host"):
        policy = Policy(config, tables=storage)
        policy.cuda()
        hidden.append(policy(tokens).hidden)
        hidden[-1].float().pow(3).sum().backward()
        for table in tables(policy):
            assert table.weight.device.type == table.weight.grad.device.type
            assert table.weight.is_pinned() == (storage == "host")
            assert table.traffic.prefetched == (storage == "host")
    assert torch.equal(hidden[0], hidden[1])
