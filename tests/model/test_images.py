"""Images from files: sizes, pixels, refusals, and the whole way into training, prefill and decode."""

import base64
import io
import itertools
import json
import math
import struct
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from model.batch import Trace
from model.chat import ChatError, DeepSeekChat, DeepSeekWording, nano_chat
from model.config import PolicyConfig
from model.images import (
    BrokenImage,
    ImageError,
    ImageNotFound,
    ImageReader,
    ImageTooLarge,
    PillowMissing,
    UnsupportedImage,
    fitted_size,
    prepare,
    source_of,
    token_count,
)
from model.policy import PackedTokens, Policy
from model.presets import OFFICIAL
from model.tokenizer import Tokenizer
from model.vision import ImageTokens, TokenType, span_types

ORACLE = Path(__file__).parents[1] / "data/oracle"
VISION = OFFICIAL.vision
assert VISION is not None


def picture(width=40, height=30, kind="PNG", mode="RGB", seed=0, **options):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(out, kind, **options)
    return out.getvalue()


def png_header(width, height):
    """A PNG that claims a size and holds almost no pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 100))


SIDES = st.integers(1, 200_000) | st.integers(1, 3000)
VISIONS = st.builds(
    replace,
    st.just(VISION),
    patch_size=st.sampled_from([2, 4, 14, 16]),
    downsample_ratio=st.integers(1, 4),
    max_image_tokens=st.integers(4, 1500),
    min_pixels=st.sampled_from([1, 144, 295936]),
    max_wh_ratio=st.sampled_from([None, 2.0, 20.5]),
)


class TestSizes:
    @given(width=SIDES, height=SIDES, vision=st.just(VISION) | VISIONS)
    def test_every_size_fits_the_budget_and_the_patches(self, width, height, vision):
        fitted = fitted_size(width, height, vision)
        assert min(fitted) >= vision.patch_size and all(side % vision.patch_size == 0 for side in fitted)
        assert 4 <= token_count(*fitted, vision) <= vision.max_image_tokens

    @pytest.mark.parametrize("tokens", [7, 11])
    def test_no_side_is_below_a_patch(self, tokens):
        vision = replace(VISION, patch_size=4, downsample_ratio=1, max_image_tokens=tokens, min_pixels=1)
        for width, height in itertools.product(range(1, 60), repeat=2):
            fitted = fitted_size(width, height, vision)
            assert min(fitted) >= 4 <= token_count(*fitted, vision) <= tokens, (width, height)

    @given(width=st.integers(1, 4000), height=st.integers(1, 4000))
    def test_a_fitted_size_is_its_own_fit(self, width, height):
        fitted = fitted_size(width, height, VISION)
        if min(fitted) > 42 and fitted[0] * fitted[1] >= VISION.min_pixels:
            assert fitted_size(*fitted, VISION) == fitted

    @given(width=st.integers(400, 3000), height=st.integers(400, 3000))
    def test_the_shape_is_kept_to_a_patch_and_the_budget_is_used(self, width, height):
        fitted = fitted_size(width, height, VISION)
        assert abs(math.log(fitted[0] / fitted[1] * height / width)) < 0.16
        if fitted[0] < width - 14:
            assert token_count(*fitted, VISION) > 0.85 * VISION.max_image_tokens

    @pytest.mark.parametrize(
        ("size", "fitted"),
        [
            # Enough area, rounded up: 700 = 50 patches, 504 = 36 patches; 12 * (17 + 1) + 2 tokens.
            ((700, 500), (700, 504)),
            # 100 * 50 pixels grow by sqrt(295936 / 5000) = 7.693...: 769 x 384 pixels, 770 x 392.
            ((100, 50), (770, 392)),
            # 4004 x 3010: ratio 0.75174..., columns floor(36.37) = 36, rows floor(27.34) = 27.
            # The columns bind at 36 * 42 / 4004 = 0.37762..., the rows at 27 * 42 / 3010 = 0.37674....
            ((4000, 3000), (1498, 1134)),
            # One column of 511 rows, one row of 1021 columns.
            ((1, 1_000_000), (42, 511 * 42)),
            ((1_000_000, 1), (1021 * 42, 42)),
        ],
    )
    def test_sizes_by_hand(self, size, fitted):
        assert fitted_size(*size, VISION) == fitted

    def test_the_spans_of_extreme_shapes_use_the_whole_budget(self):
        assert token_count(42, 511 * 42, VISION) == token_count(1021 * 42, 42, VISION) == 1024

    def test_a_wide_image_is_clipped_to_the_largest_ratio(self):
        assert fitted_size(9000, 600, replace(VISION, max_wh_ratio=1.5)) == fitted_size(900, 600, VISION)

    @given(width=SIDES, height=SIDES)
    def test_the_span_has_the_counted_tokens(self, width, height):
        fitted = fitted_size(width, height, VISION)
        grid = (fitted[1] // 14, fitted[0] // 14)
        assert len(span_types(grid, VISION.downsample_ratio)) == token_count(*fitted, VISION)


SMALL = replace(VISION, patch_size=4, min_pixels=16 * 16, max_image_tokens=60)


class TestPixels:
    def test_patches_are_the_resized_image_row_after_row(self):
        data = picture(40, 30)
        image = prepare(data, SMALL)
        width, height = fitted_size(40, 30, SMALL)
        assert image.grid == (height // 4, width // 4)
        with Image.open(io.BytesIO(data)) as opened:
            expected = np.asarray(ImageOps.pad(opened.convert("RGB"), (width, height), color=(127, 127, 127)))
        for number in (0, 1, image.grid[1], image.patches.shape[0] - 1):
            row, column = divmod(number, image.grid[1])
            tile = expected[4 * row : 4 * row + 4, 4 * column : 4 * column + 4].astype(np.float32)
            assert np.allclose(image.patches[number].permute(1, 2, 0).numpy(), tile / 127.5 - 1, atol=1e-6)
        assert image.patches.dtype is torch.float32
        assert image.patches.min() >= -1 and image.patches.max() <= 1

    def test_what_the_shape_leaves_free_is_grey(self):
        white = io.BytesIO()
        Image.new("RGB", (48, 31), (255, 255, 255)).save(white, "PNG")
        image = prepare(white.getvalue(), SMALL)
        assert image.grid == (8, 12)
        assert torch.allclose(image.patches[-1, :, 3], torch.tensor(127 / 255 * 2 - 1))
        assert image.patches[:-12].min() == 1 and image.patches[-1, :, :3].min() == 1

    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
    @pytest.mark.parametrize("mode", ["RGB", "L", "P"])
    def test_kinds_and_modes(self, kind, mode):
        if (kind, mode) in (("JPEG", "P"), ("WEBP", "P")):
            mode = "L"
        assert prepare(picture(kind=kind, mode=mode), SMALL).patches.shape[1:] == (3, 4, 4)

    def test_transparent_images_are_read(self):
        assert prepare(picture(mode="RGBA"), SMALL).grid == prepare(picture(), SMALL).grid

    def test_path_and_bytes_are_the_same(self, tmp_path):
        (tmp_path / "a.png").write_bytes(picture())
        images = [
            prepare(source, SMALL) for source in (picture(), tmp_path / "a.png", str(tmp_path / "a.png"))
        ]
        assert all(torch.equal(image.patches, images[0].patches) for image in images)


class TestRefusals:
    def test_missing_files_and_folders(self, tmp_path):
        with pytest.raises(ImageNotFound, match="there is no image"):
            prepare(tmp_path / "none.png", SMALL)
        with pytest.raises(ImageNotFound, match="is no file"):
            prepare(tmp_path, SMALL)
        with pytest.raises(ImageNotFound):
            prepare("a\0b", SMALL)
        with pytest.raises(ImageNotFound, match="cannot be a path"):
            prepare("a" * 5000, SMALL)

    @pytest.mark.parametrize(
        "size", [(9000, 8000), (12000, 12000), (100_000, 100_000), (2**31 - 1, 2**31 - 1)]
    )
    def test_a_header_that_claims_too_many_pixels(self, size):
        with pytest.raises(ImageTooLarge, match="pixels"):
            prepare(png_header(*size), SMALL)

    def test_a_file_with_too_many_bytes_is_not_even_read(self, tmp_path):
        with (tmp_path / "big.png").open("wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(ImageTooLarge, match="1099511627776 bytes"):
            prepare(tmp_path / "big.png", SMALL)
        with pytest.raises(ImageTooLarge, match="more than 10"):
            prepare(picture(), SMALL, max_bytes=10)

    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
    @pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
    def test_truncated_files(self, kind, share):
        data = picture(200, 150, kind)
        with pytest.raises((BrokenImage, UnsupportedImage)):
            prepare(data[: int(len(data) * share)], SMALL)

    @given(
        kind=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP"]),
        changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=5),
    )
    def test_damaged_bytes_are_an_image_error_or_an_image(self, kind, changes):
        data = bytearray(picture(12, 12, kind))
        for place, value in changes:
            data[place % len(data)] = value
        try:
            prepare(bytes(data), SMALL)
        except ImageError as error:
            assert len(str(error)) > 20

    @pytest.mark.parametrize("data", [b"hello", b"%!PS-Adobe-3.0 EPSF", b"<svg></svg>", b"\0" * 100])
    def test_other_kinds_of_files(self, data):
        with pytest.raises(UnsupportedImage, match="PNG, JPEG"):
            prepare(data, SMALL)

    def test_an_empty_file(self, tmp_path):
        (tmp_path / "a.png").touch()
        for source in (b"", tmp_path / "a.png"):
            with pytest.raises(BrokenImage, match="empty"):
                prepare(source, SMALL)

    @pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
    def test_animations(self, kind):
        frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
        out = io.BytesIO()
        frames[0].save(out, kind, save_all=True, append_images=frames[1:])
        with pytest.raises(UnsupportedImage, match="animated"):
            prepare(out.getvalue(), SMALL)

    def test_without_pillow_the_error_names_it(self, monkeypatch):
        data = picture()
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(PillowMissing, match="pip install"):
            prepare(data, SMALL)

    @pytest.mark.parametrize(
        ("part", "error", "match"),
        [
            ({"image_url": {"url": "https://example.org/a.png"}}, UnsupportedImage, "nothing is fetched"),
            ({"image_url": "http://example.org/a.png"}, UnsupportedImage, "nothing is fetched"),
            ({"image_url": "file:///etc/passwd"}, UnsupportedImage, "nothing is fetched"),
            ({"image_url": "data:image/png;base64,@@"}, BrokenImage, "base64"),
            ({"image_url": "data:text/html;base64,aGk="}, UnsupportedImage, "data:image"),
            ({"image_url": {}}, ImageError, "holds a URL"),
            ({}, ImageError, "has none"),
            ({"path": "a", "bytes": b"b"}, ImageError, "path, bytes"),
            ({"bytes": "text"}, ImageError, "not a str"),
            ({"path": 3}, ImageError, "not a int"),
        ],
    )
    def test_parts_that_name_no_image(self, part, error, match):
        with pytest.raises(error, match=match):
            source_of(part)


def tokenizer():
    wording = DeepSeekWording()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tags = [wording.bos, wording.eos, wording.user, wording.assistant, wording.system, wording.dsml]
    tags += [wording.think, wording.think_end]
    backend.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in tags])
    return Tokenizer(backend)


CHAT = DeepSeekChat(tokenizer(), DeepSeekWording(effort_line="{effort}", tools_section="{schemas}"))
IMAGE_ID = 299


@pytest.fixture(scope="module")
def policy():
    """The small reference configuration with a vocabulary of bytes, tags and the image token."""
    published = json.loads((ORACLE / "clean_fp32.json").read_text())
    config = PolicyConfig.from_published(published)
    assert config.vision is not None
    config = replace(
        config,
        vocab_size=300,
        image_token_id=IMAGE_ID,
        engram_token_map=tuple(i % config.engram_compressed_vocab_size for i in range(300)),
        vision=replace(config.vision, min_pixels=24 * 24, max_image_tokens=40),
    )
    policy = Policy(config)
    policy.reset_parameters(2)
    generator = torch.Generator().manual_seed(0)
    for block in policy.blocks:
        block.ffn.gate.bias_vl.copy_(torch.randn(block.ffn.gate.bias_vl.shape, generator=generator) * 0.3)
    return policy


def messages(seed=0, path=None):
    first = {"type": "image", "bytes": picture(30, 24, seed=seed)}
    url = "data:image/jpeg;base64," + base64.b64encode(picture(50, 20, "JPEG")).decode()
    second = {"type": "image", "path": path} if path else {"type": "image_url", "image_url": {"url": url}}
    text = {"type": "text", "text": "look: "}
    return [
        {"role": "user", "content": [text, first, {"type": "text", "text": " and "}, second]},
        {"role": "assistant", "content": "seen"},
        {"role": "tool", "content": [{"type": "text", "text": "shot"}, first]},
    ]


def run(policy, prompt, trace=None):
    ids = torch.tensor(prompt.token_ids)
    images = prompt.image_tokens(policy)
    return policy(PackedTokens(ids, torch.tensor([0, len(ids)]), images), trace=trace).hidden


class TestChat:
    def test_a_prompt_holds_each_image_as_a_span(self, policy):
        prompt = CHAT.prompt(messages(), effort=9, images=ImageReader.of(policy.config))
        assert len(prompt.images) == 3 and len(prompt.token_ids) == len(prompt.types)
        spans = [
            (token == IMAGE_ID) == (kind >= 0)
            for token, kind in zip(prompt.token_ids, prompt.types, strict=True)
        ]
        assert all(spans)
        assert sum(kind >= 0 for kind in prompt.types) == sum(
            len(image.types(policy.config.vision)) for image in prompt.images
        )
        text = [token for token in prompt.token_ids if token != IMAGE_ID]
        plain = json.loads(json.dumps(messages(), default=str))
        for message in plain:
            if isinstance(message["content"], list):
                message["content"] = [part for part in message["content"] if part["type"] == "text"]
        assert text == CHAT.render_prompt(plain, effort=9)
        begin = prompt.types.index(TokenType.START)
        assert CHAT.tokenizer.decode(prompt.token_ids[:begin]).endswith("look: ")

    def test_an_observation_can_hold_an_image(self, policy):
        prompt = CHAT.observation(messages()[2:], images=ImageReader.of(policy.config))
        assert len(prompt.images) == 1
        assert CHAT.tokenizer.decode(prompt.token_ids).startswith(f"{CHAT.wording.user}<tool_result>shot")

    def test_path_bytes_and_url_make_the_same_prompt(self, policy, tmp_path):
        (tmp_path / "a.jpg").write_bytes(picture(50, 20, "JPEG"))
        reader = ImageReader.of(policy.config)
        first, second = (
            CHAT.prompt(messages(path=path), images=reader) for path in (None, tmp_path / "a.jpg")
        )
        assert first.token_ids == second.token_ids
        assert all(
            torch.equal(a.patches, b.patches) for a, b in zip(first.images, second.images, strict=True)
        )

    def test_images_without_a_reader_or_in_a_text_format_are_refused(self):
        for render in (CHAT.render_prompt, CHAT.prompt):
            with pytest.raises(ChatError, match="ImageReader"):
                render(messages())
        with pytest.raises(ChatError, match="text only"):
            nano_chat().prompt([messages()[0]])
        with pytest.raises(ChatError, match="text only"):
            CHAT.render_assistant({"role": "assistant", "content": messages()[0]["content"]})
        with pytest.raises(UnsupportedImage, match="vision_config"):
            ImageReader.of(PolicyConfig.preset("nano"))

    @pytest.mark.parametrize("part", [{"type": "video"}, {"type": "text"}, 3, {"text": "x"}])
    def test_parts_of_another_kind_are_refused(self, part):
        with pytest.raises(ChatError, match="a part of a message"):
            CHAT.render_prompt([{"role": "user", "content": [part]}])

    def test_a_prompt_of_text_alone_has_no_images(self, policy):
        for chat in (CHAT, nano_chat()):
            prompt = chat.prompt([{"role": "user", "content": "1+1"}], effort=3)
            assert prompt.token_ids == chat.render_prompt([{"role": "user", "content": "1+1"}], effort=3)
            assert prompt.image_tokens(policy) is None and set(prompt.types) == {TokenType.TEXT}


class TestPolicy:
    @torch.no_grad()
    def test_what_is_in_a_picture_reaches_the_logits(self, policy):
        reader = ImageReader.of(policy.config)
        hidden = [run(policy, CHAT.prompt(messages(seed), images=reader)) for seed in (0, 0, 1)]
        assert torch.equal(hidden[0], hidden[1])
        assert (hidden[0][-1] - hidden[2][-1]).abs().max() > 1e-3

    @torch.no_grad()
    @pytest.mark.parametrize("chunk", [3, 16, 1000])
    def test_prefill_in_chunks_that_cut_spans_anywhere_is_the_training_forward(self, policy, chunk):
        prompt = CHAT.prompt(messages(), images=ImageReader.of(policy.config))
        expected = run(policy, prompt)
        ids, images = torch.tensor([prompt.token_ids]), prompt.image_tokens(policy)
        cache = policy.new_cache(2, 512)
        slots = torch.tensor([cache.allocate()])
        for begin in range(0, ids.shape[1], chunk):
            end = min(begin + chunk, ids.shape[1])
            part = images.part(begin, end)
            hidden = policy.extend(
                cache,
                slots,
                ids[:, begin:end],
                torch.tensor([end - begin]),
                images=ImageTokens(part.types.unsqueeze(0), part.rows),
            )
            assert (policy.logits(hidden[0]) - policy.logits(expected[end - 1])).abs().max() < 2e-5

    @torch.no_grad()
    def test_two_sequences_with_and_without_images_in_one_prefill(self, policy):
        reader = ImageReader.of(policy.config)
        prompts = [
            CHAT.prompt(m, images=reader)
            for m in (messages(), [{"role": "user", "content": "no"}], messages(3))
        ]
        lengths = torch.tensor([len(p.token_ids) for p in prompts])
        ids = torch.zeros(3, int(lengths.max()), dtype=torch.int64)
        types = torch.full_like(ids, TokenType.TEXT)
        for row, prompt in enumerate(prompts):
            ids[row, : lengths[row]] = torch.tensor(prompt.token_ids)
            types[row, : lengths[row]] = torch.tensor(prompt.types)
        rows = torch.cat([tokens.rows for p in prompts if (tokens := p.image_tokens(policy)) is not None])
        cache = policy.new_cache(3, 512)
        slots = torch.tensor([cache.allocate() for _ in prompts])
        hidden = policy.extend(cache, slots, ids, lengths, images=ImageTokens(types, rows))
        for row, prompt in enumerate(prompts):
            assert (hidden[row] - run(policy, prompt)[-1]).abs().max() < 1e-4

    @torch.no_grad()
    def test_the_memory_of_n_grams_neither_takes_nor_gives_on_image_tokens(self, policy):
        trace = Trace()
        prompt = CHAT.prompt(messages(), images=ImageReader.of(policy.config))
        run(policy, prompt, trace)
        types = torch.tensor(prompt.types)
        rows = trace.values["engram_hash_ids"]
        assert (rows[types >= 0] == rows[types >= 0][0]).all()
        first, last = policy.config.engram_layer_ids
        before, after = trace.values[f"layers.{last - 1}.streams"], trace.values[f"layers.{last}.engram_out"]
        assert torch.equal(before[types >= 0], after[types >= 0])
        assert not torch.equal(before[types < 0], after[types < 0])
        # The token after a span has no look-back into it: its bigram is that of a first token.
        end = prompt.types.index(TokenType.END) + 1
        heads = policy.config.engram_n_heads
        lone = Trace()
        alone = torch.tensor(prompt.token_ids[end : end + 1])
        policy(PackedTokens(alone, torch.tensor([0, 1])), trace=lone)
        assert torch.equal(rows[end, 0, :heads], lone.values["engram_hash_ids"][0, 0, :heads])
        assert first < last

    @torch.no_grad()
    def test_image_tokens_are_routed_by_their_own_bias(self, policy):
        prompt = CHAT.prompt(messages(), images=ImageReader.of(policy.config))
        types = torch.tensor(prompt.types)
        gate = policy.blocks[0].ffn.gate
        kept = gate.bias_vl.clone()
        gate.bias_vl[3] += 100.0
        trace = Trace()
        run(policy, prompt, trace)
        gate.bias_vl.copy_(kept)
        chosen = (trace.values["layers.0.router_ids"] == 3).any(-1)
        assert chosen[types >= 0].all() and not chosen[types < 0].all()

    def test_training_reaches_the_tower_through_a_file(self, policy):
        prompt = CHAT.prompt(messages(), images=ImageReader.of(policy.config))
        run(policy, prompt)[-1].sum().backward()
        for parameter in (
            policy.vision.patch_embed.proj.weight,
            policy.image_newline,
            policy.aligner.w2.weight,
        ):
            assert parameter.grad.abs().max() > 0
        policy.zero_grad(set_to_none=True)

    def test_rows_of_other_images_are_refused(self, policy):
        prompt = CHAT.prompt(messages(), images=ImageReader.of(policy.config))
        images = prompt.image_tokens(policy)
        wrong = ImageTokens(images.types, images.rows[1:])
        with pytest.raises(ValueError, match="image rows"):
            policy(
                PackedTokens(torch.tensor(prompt.token_ids), torch.tensor([0, len(prompt.token_ids)]), wrong)
            )
