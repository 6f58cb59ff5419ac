"""A turn read in pieces: never an error, events that join to the turn, and at the end the turn of `parse`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from model.chat import ChatError, DeepSeekChat, EventKind, load_chat, nano_chat
from model.chat.oracle import wording_of
from model.chat.stream import StreamDecoder
from model.checkpoint import save_policy
from model.config import PolicyConfig
from model.policy import Policy
from model.tokenizer import Tokenizer

ORACLE = json.loads((Path(__file__).parents[1] / "data/oracle/chat.json").read_text())
WORDING = wording_of(ORACLE)


def byte_tokenizer() -> Tokenizer:
    """One token a byte and a few longer ones, so that characters are cut by tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelt = [Backend(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))]
    spelt[0].pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    halves = [token for text in ("€", "ca", "lls") for token in [spelt[0].encode(text).tokens]]
    merges = [(tokens[0], tokens[1]) for tokens in halves]
    vocabulary = {symbol: i for i, symbol in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    backend = Backend(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = ("bos", "eos", "user", "assistant", "system", "dsml", "think", "think_end")
    tags = [getattr(WORDING, name) for name in names]
    backend.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in tags])
    return Tokenizer(backend)


TOKENIZER = byte_tokenizer()
CHATS = {
    "thinking": DeepSeekChat(TOKENIZER, WORDING),
    "direct": DeepSeekChat(TOKENIZER, WORDING, thinking=False),
    "nano": nano_chat(),
}
CALC = {
    "type": "function",
    "function": {
        "name": "calculate",
        "parameters": {
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
BASH = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"properties": {"command": {}, "limit": {}}}},
}
PIECES = [
    *(WORDING.eos, WORDING.think, WORDING.think_end, WORDING.bos, WORDING.dsml, "< calls>", "\n\n", "\n"),
    *("<｜DSML｜ calls>", "\n\n<｜DSML｜ calls>\n", "</｜DSML｜ calls>", "</｜DSML｜ invoke>", "<", ">", " "),
    *('<｜DSML｜ invoke name="bash">', '<｜DSML｜ parameter name="command" string="true">', "€", 'a"b', "\\"),
    *('<｜DSML｜ parameter name="limit" string="false">', "</｜DSML｜ parameter>", "12", '[1, "é"]', "NaN"),
]


def replay(events):
    """The turn that a listener of the events would show."""
    shown = {"reasoning": "", "content": "", "calls": []}
    for event in events:
        if event.kind is EventKind.RESTARTED:
            shown = {"reasoning": event.text, "content": "", "calls": []}
        elif event.kind in (EventKind.REASONING, EventKind.CONTENT):
            shown[event.kind.value] += event.text
        elif event.kind is EventKind.CALL_STARTED:
            assert event.index == len(shown["calls"])
            shown["calls"].append({"name": event.name, "arguments": "", "finished": False})
        elif event.kind is EventKind.ARGUMENTS:
            assert event.text and not shown["calls"][event.index]["finished"]
            shown["calls"][event.index]["arguments"] += event.text
        elif event.kind is EventKind.CALL_FINISHED:
            shown["calls"][event.index]["finished"] = True
    return shown


def read(chat, ids, cuts, tools):
    """Feeds `ids` cut at `cuts`; returns all events and the turn."""
    stream, events, begin = chat.stream(tools=tools), [], 0
    for end in [*sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]:
        events += stream.feed(ids[begin:end])
        begin = end
    return events + stream.end(), stream.finish()


def check(chat, ids, cuts, tools):
    events, turn = read(chat, ids, cuts, tools)
    assert turn == chat.parse(ids, tools=tools)
    assert [event.kind for event in events].count(EventKind.DONE) == 1
    shown = replay(events)
    if turn.parse_error:
        return turn, shown
    assert shown["reasoning"] == turn.message.get("reasoning_content", "")
    assert shown["content"] == turn.message["content"]
    calls = [call["function"] for call in turn.message.get("tool_calls", ())]
    assert [(c["name"], c["arguments"]) for c in shown["calls"]] == [
        (c["name"], c["arguments"]) for c in calls
    ]
    assert all(call["finished"] for call in shown["calls"])
    return turn, shown


CUTS = st.lists(st.integers(0, 400), max_size=30)


@pytest.mark.parametrize("name", ["thinking", "direct"])
@given(pieces=st.lists(st.sampled_from(PIECES)), cuts=CUTS)
def test_any_tags_in_any_order_cut_anywhere(name, pieces, cuts):
    check(CHATS[name], TOKENIZER.encode_tagged("".join(pieces)), cuts, [BASH])


@pytest.mark.parametrize("name", ["thinking", "direct"])
@given(ids=st.lists(st.integers(-2, TOKENIZER.vocab_size + 2) | st.integers(128, 255)), cuts=CUTS)
def test_any_ids(name, ids, cuts):
    check(CHATS[name], ids, cuts, [])


@given(
    ids=st.lists(
        st.integers(-2, 66) | st.sampled_from(sorted(nano_chat().tokenizer.tags.values())), max_size=30
    ),
    cuts=CUTS,
)
def test_any_ids_of_the_small_presets(ids, cuts):
    for tools in ([], [CALC], [BASH], [CALC, BASH]):
        check(CHATS["nano"], ids, cuts, tools)


TEXT = st.text(max_size=20).filter(lambda text: not any(tag in text for tag in ("｜", "think>")))
"""Text that spells no tag: a tag spelt out in a turn is read as one."""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)
NAMES = st.text("abc_é.", min_size=1, max_size=6)


@pytest.mark.parametrize("name", ["thinking", "direct"])
@settings(max_examples=40)
@given(
    reasoning=TEXT,
    content=TEXT,
    calls=st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), max_size=3),
    cuts=CUTS,
)
def test_a_rendered_turn_streams_to_itself(name, reasoning, content, calls, cuts):
    chat = CHATS[name]
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    message["tool_calls"] = [{"function": {"name": n, "arguments": json.dumps(a)}} for n, a in calls]
    turn, shown = check(chat, chat.render_assistant(message), cuts, [])
    assert not turn.parse_error
    assert [(c["name"], json.loads(c["arguments"])) for c in shown["calls"]] == calls
    assert shown["reasoning"] == (reasoning if name == "thinking" else "")


@given(
    turn=st.sampled_from(["hm<47*86>", "<1+1><2+2>$", "#4042$", "a#b$", "<1", "#1"]),
    cuts=st.lists(st.integers(0, 9)),
)
def test_turns_of_the_small_presets(turn, cuts):
    tags = {"<": "<call>", ">": "</call>", "#": "<answer>", "$": "<end>"}
    ids = [i for c in turn for i in CHATS["nano"].tokenizer.encode_tagged(tags.get(c, c))]
    check(CHATS["nano"], ids, cuts, [CALC])


def test_text_is_shown_as_soon_as_it_cannot_be_a_tag():
    chat = CHATS["thinking"]
    stream = chat.stream()

    def feed(text):
        return [(event.kind.value, event.text) for event in stream.feed(TOKENIZER.encode_tagged(text))]

    assert feed("so") == [("reasoning", "so")]
    assert feed(f"{WORDING.think_end}x\n\n") == [("content", "x")]
    assert feed("<") == []
    assert feed("b") == [("content", "\n\n<b")]
    first, *rest = TOKENIZER.encode("é")
    assert stream.feed([first]) == []
    assert [event.text for event in stream.feed(rest)] == ["é"]
    opening = '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="bash">\n'
    opening += '<｜DSML｜ parameter name="command" string="true">ls'
    events = stream.feed(TOKENIZER.encode_tagged(opening))
    assert events[0].name == "bash" and "".join(e.text for e in events) == '{"command": "ls'


def test_a_closing_tag_without_thinking_makes_reasoning_of_what_was_shown():
    events, turn = read(
        CHATS["direct"], TOKENIZER.encode_tagged(f"r{WORDING.think_end}c{WORDING.eos}"), [1], []
    )
    assert [event.kind for event in events] == [
        EventKind.CONTENT,
        EventKind.RESTARTED,
        EventKind.CONTENT,
        EventKind.DONE,
    ]
    assert turn.message == {"role": "assistant", "content": "c", "reasoning_content": "r"}


@given(
    data=st.binary(max_size=40) | st.lists(st.sampled_from([b"\xe2", b"\x82", b"\xac", b"a"])).map(b"".join)
)
def test_invalid_bytes_decode_as_they_do_in_one_piece(data):
    alphabet = dict(zip(range(256), (TOKENIZER.decode([i]) for i in range(256)), strict=True))
    assert len(alphabet) == 256
    decoder = StreamDecoder(TOKENIZER)
    ids = list(data)
    pieces = [decoder.feed([index]) for index in ids]
    assert "".join(pieces) + decoder.end() == TOKENIZER.decode(ids)


def test_a_long_run_of_broken_characters_is_not_held_back():
    broken = next(i for i in range(256) if TOKENIZER.decode([i, i]) == "\ufffd\ufffd")
    decoder = StreamDecoder(TOKENIZER)
    assert len(decoder.feed([broken] * 1000)) > 990


def test_the_wording_in_the_folder_is_what_is_rendered(tmp_path):
    chat, policy = CHATS["thinking"], Policy(PolicyConfig.preset("pico"))
    save_policy(policy, tmp_path, chat=chat)
    messages = [{"role": "user", "content": "hi"}]

    def rendered():
        return TOKENIZER.decode(load_chat(tmp_path).render_prompt(messages, tools=[BASH], effort=50))

    before = rendered()
    assert WORDING.effort_line.format(effort=50) in before
    data = json.loads((tmp_path / "chat_format.json").read_text())
    data["wording"]["effort_line"] = "Effort {effort}.\n"
    data["wording"]["tools_section"] = "Tools: {schemas}"
    (tmp_path / "chat_format.json").write_text(json.dumps(data))
    after = rendered()
    assert 'Effort 50.\n\n\nTools: {"name": "bash"' in after and "## Tools" not in after


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda data: data["wording"].update(colour="red"), "unknown fields.*colour"),
        (lambda data: data["wording"].pop("effort_line"), "lacks.*effort_line"),
        (lambda data: data.update(version=2), "unknown fields.*version"),
        (
            lambda data: data["wording"].update(effort_line="no number"),
            r"effort_line must hold \{effort\} once",
        ),
        (lambda data: data["wording"].update(default_effort=101), "1 to 100"),
        (lambda data: data["wording"].update(user=3), "user is a str"),
        (lambda data: data.update(thinking="yes"), "thinking is true or false"),
        (lambda data: data.update(wording=[]), "not an object"),
    ],
)
def test_a_wording_that_is_not_whole_is_refused(tmp_path, change, match):
    CHATS["thinking"].save(tmp_path)
    data = json.loads((tmp_path / "chat_format.json").read_text())
    change(data)
    (tmp_path / "chat_format.json").write_text(json.dumps(data))
    with pytest.raises(ChatError, match=match):
        load_chat(tmp_path)


@pytest.mark.parametrize("effort", [0, 101, -5, 50.0, True, "50", None.__class__])
def test_an_effort_that_is_no_integer_from_1_to_100_is_refused(effort):
    with pytest.raises(ChatError, match="effort"):
        CHATS["thinking"].render_prompt([{"role": "user", "content": "u"}], effort=effort)


def test_braces_in_a_wording_stay():
    chat = DeepSeekChat(TOKENIZER, replace(WORDING, effort_line="{{effort} {x}}\n"))
    text = TOKENIZER.decode(chat.render_prompt([{"role": "user", "content": "u"}], effort=7))
    assert "{7 {x}}\n" in text
