"""The bytes-a-token figure is measured and follows the configuration."""

import json
from dataclasses import replace

import pytest

from benchmarks import kv_bytes
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
    assert sizes.encoder_window * 2 == sizes.window
    assert sizes.open_groups == 3 * 2 * 2 * head_dim * 4
