"""The bytes-a-token figure is measured and follows the configuration."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import kv_bytes
from benchmarks.model_gpu_setup import official_widths
from model.cache.page_keys import Fingerprint
from model.cache.policy_cache import PolicyCache
from model.cache.prefix import PrefixStore, PrefixTiers
from model.config import PolicyConfig


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["kv_bytes", *arguments])
    assert kv_bytes.main() == 0
    return capsys.readouterr().out.splitlines()


def test_the_released_configuration_takes_890_bytes(monkeypatch, capsys):
    lines = run(monkeypatch, capsys)
    assert lines[-1] == "kv_bytes_per_token 890"
    by_length = {line.split()[0]: line.split()[-1] for line in lines[2:7]}
    assert by_length["4096"] == "660" and by_length["131072"] == "21"


def test_without_one_source_it_takes_712(monkeypatch, capsys, tmp_path):
    config = replace(
        PolicyConfig.preset("official"),
        kv_source_layer_ids=(2, 8, 20),
        index_source_layer_ids=(2, 8, 20, 24, 28, 32, 36),
    )
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.to_published()))
    assert run(monkeypatch, capsys, "--config", str(file))[-1] == "kv_bytes_per_token 712"


@pytest.mark.parametrize(("head_dim", "index_dim"), [(512, 128), (256, 128), (512, 64)])
def test_it_follows_the_widths(head_dim, index_dim):
    config = replace(PolicyConfig.preset("official"), head_dim=head_dim, index_head_dim=index_dim)
    sizes = kv_bytes.measure(config)
    assert sizes.main_per_token == 2.5 * (head_dim // 2 + head_dim // 16)
    assert sizes.index_per_token == 2.5 * (index_dim // 2 + index_dim // 32)
    assert sizes.window == 40 * 128 * (head_dim + head_dim // 32)
    assert sizes.open_groups == 3 * 2 * 2 * head_dim * 4


@pytest.mark.parametrize("layers", [None, 6, 12])
def test_a_token_takes_its_keys_and_an_entry_of_the_page_table(layers):
    config = PolicyConfig.preset("official") if layers is None else official_widths(layers)
    entries = {None: 2.5, 6: 1.5, 12: 2.5}[layers]
    assert kv_bytes.growth(config, torch.device("cpu")) == 356 * entries + 8 / 64


def test_every_buffer_of_a_cache_is_counted_once():
    config = PolicyConfig.preset("official")
    sizes = kv_bytes.measure(config)
    cache = PolicyCache(config, 1, 256, torch.float32, torch.device("cpu"), "packed", slack=0)
    drafts = config.num_nextn_predict_layers * config.sliding_window * 528 + 2 * 8
    keys_and_table = 5 * 64 * 890 + 4 * 8
    rings = sizes.window + sizes.open_groups + sizes.look_back
    assert kv_bytes.allocated(cache) == keys_and_table + rings + drafts


def test_hits_fetch_what_the_store_has_and_run_the_rest_again(monkeypatch, capsys):
    lines = [line.split() for line in run(monkeypatch, capsys) if line.split()[0] == "65536"]
    assert all(line[-1] in ("0", "128", "65536") for line in lines[1:])
    hits = {(line[1], line[2]): [int(number) for number in line[3:]] for line in lines[1:]}
    keys = 65536 // 64 * (64 * 890 + 80)
    tail = 40 * 128 * 528 + 3 * 2 * 1024 * 4 + 3 * 8 + 80
    assert hits == {
        ("accelerator", "host"): [tail, 0, 0],
        ("accelerator", "lost"): [0, 0, 128],
        ("host", "host"): [keys + tail, 0, 0],
        ("host", "lost"): [keys, 0, 128],
        ("disk", "host"): [tail, keys, 0],
        ("disk", "lost"): [0, keys, 128],
        ("none", "lost"): [0, 0, 65536],
    }


def test_the_store_writes_what_the_tables_say(memory_folder):
    config = PolicyConfig.preset("nano")
    sizes = kv_bytes.measure(config)
    cache = PolicyCache(config, 1, 200, torch.float32, torch.device("cpu"), "packed", slack=0)
    tiers = PrefixTiers(host_folder=memory_folder, host_bytes=1 << 20, memory_bytes=1 << 24)
    fingerprint = Fingerprint.of(config, model="run", version=0, tokenizer="t", numerics={})
    store = PrefixStore(fingerprint, tiers, config=config, replay="bounded")
    slot = cache.allocate()
    cache.advance([slot], cache.make_room([slot], [150]))
    store.save(cache, slot, [1] * 150)
    assert store.stats().host.nbytes == sizes.pages(150)
    # A tail also names its tensors.
    assert 0 < store.stats().windows.nbytes - sizes.tail(150) < 600
