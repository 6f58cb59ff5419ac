"""Demonstrations from files: what is trained, where a run goes on, and what is said about a bad row."""

import base64
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from model.chat import nano_chat
from model.chat.prompt import Prompt
from model.config import PolicyConfig, VisionConfig
from model.images import ImageReader
from model.policy import Policy
from rl.launch.compose import ConfigError, load_config
from rl.rollout.codec import trajectory_to_json
from rl.trainers import OptimizerConfig, SFTConfig, SFTTrainer
from rl.trainers.conversations import Renderer
from rl.trainers.data_files import DataError, open_rows
from rl.trainers.demonstrations import Demonstrations
from rl.trainers.packing import micro_batches
from rl.trainers.sft_data import FileSamples

CHAT = nano_chat()
EXAMPLE = Path(__file__).parents[3] / "examples" / "sft.jsonl"


def conversation(question="2*3=", answer="6", **more):
    return {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
        **more,
    }


def write(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def stream(*paths, seed=0, **settings):
    return FileSamples([str(path) for path in paths], Renderer(CHAT, **settings), seed)


def trained_text(sample):
    return CHAT.tokenizer.decode(sample.token_ids[sample.loss_mask].tolist())


def spans(sample):
    return int((np.diff(np.concatenate([[0], sample.loss_mask])) == 1).sum())


def test_only_what_the_assistant_says_is_trained_over_turns_and_tool_calls():
    call = {"function": {"name": "python", "arguments": '{"expression": "2*3"}'}}
    row = {
        "messages": [
            {"role": "user", "content": "2*3="},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "6"},
            {"role": "assistant", "content": "6"},
            {"role": "user", "content": "and 6*2="},
            {"role": "assistant", "content": "12"},
        ],
        "effort": 50,
    }
    (sample,) = Renderer(CHAT).samples(row, "here")
    assert trained_text(sample) == "<call>2*3</call><answer>6<end><answer>12<end>"
    assert spans(sample) == 3 and sample.effort == 50 and not sample.loss_mask[0]
    row["messages"][3]["train"] = False
    (less,) = Renderer(CHAT).samples(row, "here")
    assert trained_text(less) == "<call>2*3</call><answer>12<end>"
    assert np.array_equal(less.token_ids, sample.token_ids)


def test_text_that_looks_like_an_answer_is_not_trained_when_others_say_it():
    row = conversation("say <answer>6<end> 2*3=", "6")
    (sample,) = Renderer(CHAT).samples(row, "here")
    assert trained_text(sample) == "<answer>6<end>" and spans(sample) == 1


def test_what_follows_the_last_assistant_is_left_out():
    row = conversation()
    row["messages"].append({"role": "user", "content": "thanks"})
    (sample,) = Renderer(CHAT).samples(row, "here")
    assert sample.loss_mask[-1]


def test_trajectories_keep_their_sampled_ids_and_the_worse_are_passed_over(
    make_turn, make_trajectory, tmp_path
):
    rows = [
        {"trajectory": trajectory_to_json(make_trajectory([[make_turn([4, 5], [6, 7])]], reward, group=i))}
        for i, reward in enumerate((1.0, 0.0, None))
    ]
    path = write(tmp_path / "t.jsonl", rows)
    every = stream(path).in_order(9)
    assert len(every) == 3 and every[0].token_ids[every[0].loss_mask].tolist() == [6, 7]
    assert len(stream(path, min_score=0.5).in_order(9)) == 1
    with pytest.raises(DataError, match=r"below sft\.min_score"):
        next(stream(path, min_score=2.0))


def test_it_goes_on_at_the_exact_sample_and_shuffles_each_epoch(tmp_path):
    path = write(tmp_path / "a.jsonl", [conversation(f"{i}=", str(i)) for i in range(7)])
    other = write(tmp_path / "b.jsonl", [conversation(f"{i}+=", str(i)) for i in range(4)])
    straight = stream(path, other)
    ids = [next(straight).id for _ in range(33)]
    assert {len(set(ids[i : i + 11])) for i in (0, 11, 22)} == {11}
    assert ids[:11] != ids[11:22]
    first = stream(path, other)
    for _ in range(17):
        next(first)
    resumed = stream(path, other)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [next(resumed).id for _ in range(16)] == ids[17:]
    assert resumed.epoch == 3


def test_a_trajectory_of_two_branches_is_resumed_between_them(make_turn, make_trajectory, tmp_path):
    branches = [[make_turn([4], [6])], [make_turn([4], [7, 8])]]
    path = write(tmp_path / "t.jsonl", [{"trajectory": trajectory_to_json(make_trajectory(branches, 1.0))}])
    first = stream(path)
    next(first)
    resumed = stream(path)
    resumed.load_state_dict(first.state_dict())
    assert len(next(resumed)) == 3


def test_other_files_are_refused_on_resuming(tmp_path):
    path = write(tmp_path / "a.jsonl", [conversation()] * 3)
    state = stream(path).state_dict()
    write(tmp_path / "a.jsonl", [conversation()] * 2)
    with pytest.raises(DataError, match="resume with the same files"):
        stream(path).load_state_dict(state)


def test_parquet_rows_are_those_of_jsonl(tmp_path):
    rows = [conversation(f"{i}=", str(i), effort=None if i % 2 else 50) for i in range(9)]
    rows = [{k: v for k, v in row.items() if v is not None} for row in rows]
    lines = write(tmp_path / "a.jsonl", rows)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=4)
    for ours, theirs in zip(
        stream(tmp_path / "a.parquet").in_order(99), stream(lines).in_order(99), strict=True
    ):
        assert np.array_equal(ours.token_ids, theirs.token_ids) and ours.effort == theirs.effort


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"a\.jsonl:2: not JSON"),
        ("[1]", r"a\.jsonl:2: a row is an object, not a list"),
        ('{"mesages": []}', r"a\.jsonl:2: a conversation has no 'mesages'; it may have"),
        ("{}", r"a\.jsonl:2: 'messages' is missing"),
        ('{"messages": []}', "a list with at least one message"),
        (json.dumps({"messages": [{"role": "user", "content": "a"}]}), "no assistant's turn to learn from"),
        (json.dumps({"messages": [{"role": "assistant", "content": "a"}]}), "the assistant speaks first"),
        (json.dumps(conversation(effort=0)), "effort is an integer from 1 to 100"),
        (json.dumps({"messages": [{"role": "user", "content": "a", "contents": 1}]}), "message 1 has no"),
        (json.dumps({"messages": [{"role": "x", "content": "a"}, *conversation()["messages"]]}), "role is"),
        (json.dumps(conversation("1" * 99)), r"more than sft\.max_tokens=50"),
        (json.dumps(conversation([{"type": "image", "path": "x.png"}])), r"a\.jsonl:2: "),
        ('{"trajectory": {}}', r"a\.jsonl:2: "),
        ('{"trajectory": "x"}', r"a\.jsonl:2: trajectory is an object"),
        (json.dumps(conversation(tools="python")), r"a\.jsonl:2: tools is a list of objects"),
        (json.dumps(conversation(tools=["python"])), r"a\.jsonl:2: tools is a list of objects"),
        (json.dumps({"messages": [{"role": "assistant", "tool_calls": "x"}]}), "message 1: tool_calls is a"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(conversation()) + "\n" + line + "\n")
    with pytest.raises(DataError, match=message):
        stream(path, max_tokens=50).in_order(2)


def test_blank_lines_count_as_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n" + json.dumps(conversation()) + "\n\n{}\n")
    assert len(open_rows(str(path))) == 2
    with pytest.raises(DataError, match=r"a\.jsonl:4"):
        stream(path).in_order(2)


@pytest.mark.parametrize("line", [b"{", b"\0" * 9, b'{"messages": "\xff"}', b"[" * 100_000])
def test_a_line_that_is_no_json_is_told_before_training_begins(tmp_path, line):
    path, good = tmp_path / "a.jsonl", json.dumps(conversation()).encode() + b"\n"
    path.write_bytes(good + line + b"\n" + good)
    with pytest.raises(DataError, match=r"a\.jsonl:2: not JSON"):
        open_rows(str(path))


def test_a_damaged_row_group_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([conversation() for _ in range(2000)]), path)
    damaged = bytearray(path.read_bytes())
    damaged[40:200] = bytes(160)
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"a\.parquet, row 1: cannot be read"):
        stream(path).in_order(1)


def test_validation_files_without_a_sample_are_refused(make_turn, make_trajectory, tmp_path):
    bad = make_trajectory([[make_turn([4], [6])]], 0.0)
    path = write(tmp_path / "a.jsonl", [{"trajectory": trajectory_to_json(bad)}])
    config = load_config(["sft.steps=1", f"sft.validation=[{path}]", "sft.min_score=2"])
    with pytest.raises(DataError, match=r"no row of sft\.validation gives a sample"):
        Demonstrations(config, CHAT, PolicyConfig.preset("nano"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.jsonl", None, "no such file; there are other.jsonl"),
        ("empty.jsonl", "\n", "holds no row"),
        ("a.csv", "x", "unknown kind of file"),
        ("a.parquet", "x", "not a Parquet file"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path, name, text, message):
    write(tmp_path / "other.jsonl", [conversation()])
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        open_rows(str(tmp_path / name))


def test_cutting_keeps_the_beginning():
    renderer = Renderer(CHAT, max_tokens=8, cut=True)
    (sample,) = renderer.samples(conversation("2*3=", "123456789"), "here")
    assert len(sample) == 8 and sample.truncated and trained_text(sample) == "<answer>123"
    with pytest.raises(DataError, match="none is an assistant's"):
        renderer.samples(conversation("1" * 20, "1"), "here")


def test_a_run_takes_files_validates_and_resumes(tmp_path):
    path = write(tmp_path / "a.jsonl", [conversation(f"{i}=", str(i)) for i in range(5)])
    config = load_config(
        ["sft.steps=4", f"sft.data=[{path}]", f"sft.validation=[{path}]", "sft.validate_every=2"]
    )
    data = Demonstrations(config, CHAT, PolicyConfig.preset("nano"))
    assert [data.validates_at(step) for step in (1, 2, 3, 4)] == [False, True, False, True]
    assert len(data.validation) == 5
    data.take(3)
    again = Demonstrations(config, CHAT, PolicyConfig.preset("nano"))
    again.load_state_dict(data.state_dict(), 3)
    assert [s.id for s in again.take(4)] == [s.id for s in data.take(4)]
    assert data.metrics() == {"sft/epoch": 1.4}


@pytest.mark.parametrize(
    ("override", "message"),
    [("sft.cut=true", "no effect without max_tokens"), ("sft.effort=50", r"no effect without sft\.data")],
)
def test_settings_without_effect_are_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        load_config([override])


def test_the_example_file_trains(make_policy):
    samples = stream(EXAMPLE).in_order(99)
    assert len(samples) >= 4 and max(spans(sample) for sample in samples) >= 2
    assert not (np.concatenate([s.token_ids for s in samples]) == CHAT.tokenizer.tag_id("<unk>")).any()


def picture():
    out = io.BytesIO()
    Image.fromarray(np.arange(12 * 18 * 3, dtype=np.uint8).reshape(12, 18, 3)).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


class PicturingChat(type(CHAT)):
    """The small format with images where its text stands, as the large one has them."""

    def prompt(self, messages, *, tools=(), effort=None, images=None):
        pieces = [
            images.read(part) if isinstance(part, dict) else self.tokenizer.encode(part)
            for message in messages
            for part in message["content"]
        ]
        return Prompt.of_pieces(pieces, images)


def test_images_reach_the_policy_and_its_image_tower_learns():
    vision = VisionConfig(
        num_hidden_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=16,
        patch_size=6,
        rope_theta=10000.0,
        downsample_ratio=1,
        max_image_tokens=16,
        min_pixels=36,
        max_wh_ratio=None,
    )
    policy = Policy(replace(PolicyConfig.preset("nano"), vision=vision, image_token_id=60))
    content = ["2*3=", {"type": "image_url", "image_url": {"url": picture()}}]
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "6"}]}
    chat = PicturingChat(CHAT.tokenizer, CHAT.wording)
    (sample,) = Renderer(chat, ImageReader.of(policy.config)).samples(row, "here")
    assert sample.images is not None and (sample.token_ids == 60).sum() == (sample.images.types >= 0).sum()
    (text,) = Renderer(CHAT).samples(conversation(), "there")
    trainer = SFTTrainer(policy, SFTConfig(optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=0)))
    tower = policy.vision.state_dict()
    before = {name: tensor.clone() for name, tensor in tower.items()}
    bias = policy.blocks[0].ffn.gate.bias_vl.clone()
    trainer.step([text, sample])
    assert any(not torch.equal(before[name], tensor) for name, tensor in tower.items())
    assert not torch.equal(policy.blocks[0].ffn.gate.bias_vl, bias)
    (batch,) = micro_batches([text, sample], 99, torch.device("cpu"))
    assert batch.image_types is not None and len(batch.images) == 1
