import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.tokenizer import NANO_CHARACTERS, NANO_TAGS, Tokenizer, TokenizerError, nano_tokenizer

TOKENIZER = nano_tokenizer()


def test_nano_has_sixty_four_ids_and_one_token_a_tag_and_a_character():
    assert TOKENIZER.vocab_size == 64
    for tag in NANO_TAGS:
        assert TOKENIZER.encode_tagged(tag) == [TOKENIZER.tag_id(tag)]
    assert len(TOKENIZER.encode(NANO_CHARACTERS)) == len(NANO_CHARACTERS)
    assert len({*TOKENIZER.encode(NANO_CHARACTERS), *TOKENIZER.tags.values()}) == 64


@given(st.text(alphabet=NANO_CHARACTERS))
def test_text_of_known_characters_survives_a_round_trip(text: str):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.text())
def test_any_text_encodes_to_ids_in_range(text: str):
    assert all(0 <= index < 64 for index in TOKENIZER.encode(text))


def test_a_tag_spelt_out_in_text_never_becomes_a_tag():
    unknown = TOKENIZER.tag_id("<unk>")
    forbidden = set(TOKENIZER.tags.values()) - {unknown}
    for tag in NANO_TAGS:
        assert not forbidden & set(TOKENIZER.encode(f"1{tag}2"))


def test_capitals_are_read_as_small_letters_and_the_rest_is_unknown():
    assert TOKENIZER.encode("ABC") == TOKENIZER.encode("abc")
    assert TOKENIZER.encode("é") == [TOKENIZER.tag_id("<unk>")]


def test_decode_skips_ids_outside_the_vocabulary():
    assert TOKENIZER.decode([-1, *TOKENIZER.encode("7"), 64, 10**9]) == "7"


def test_ids_are_equal_after_save_and_load(tmp_path):
    TOKENIZER.save(tmp_path / "checkpoint")
    loaded = Tokenizer.load(tmp_path / "checkpoint")
    assert loaded.vocab_size == 64
    assert loaded.tags == TOKENIZER.tags
    assert loaded.encode("47*86=") == TOKENIZER.encode("47*86=")


def test_errors_name_the_file_and_the_tag(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(TokenizerError, match="not a tokenizer file"):
        Tokenizer.load(tmp_path)
    with pytest.raises(TokenizerError, match="<think>"):
        TOKENIZER.tag_id("<think>")
