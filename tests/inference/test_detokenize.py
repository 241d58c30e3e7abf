"""Covers the incremental detokeniser: joined pieces are the decoding of all tokens, for real tokenizers."""

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from shardfn.data import ByteTokenizer
from shardfn.inference import Detokenizer, detokenizer
from tests.inference.tokenizers import ASKED, FOLLOWED, SPECIAL, trained

LETTERS = st.text(st.sampled_from("ab c\u00e9e\u0301日\U0001f600\u200d\U0001f469\n\u2581.<0x"), max_size=12)


def pieces(one: Detokenizer, tokens: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    growing = one.start(prompt)
    return [*(growing.add(token) for token in tokens), growing.end()]


@st.composite
def ids(draw: st.DrawFn, kind: str) -> list[int]:
    """Tokens of texts, between tokens of any ids: single bytes, special ones, unknown ones."""
    made = trained(kind)
    some = st.lists(st.integers(0, made.get_vocab_size() + 2), max_size=6)
    encoded = st.one_of(LETTERS, st.text(max_size=5)).map(lambda text: made.encode(text).ids)
    singles = [i for token, i in made.get_vocab().items() if len(token) == 1 or token.startswith("<0x")]
    parts = draw(st.lists(st.one_of(some, encoded, st.lists(st.sampled_from(singles), max_size=9)), max_size=6))
    return [token for part in parts for token in part]


@pytest.mark.nightly
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("kind", FOLLOWED + ASKED)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_joined_pieces_are_the_decoding_of_all(kind: str, special: bool, data: st.DataObject) -> None:
    made, one = trained(kind), detokenizer(trained(kind), special=special)
    tokens = data.draw(ids(kind))
    assert "".join(pieces(one, tokens)) == made.decode(tokens, skip_special_tokens=not special) == one.decode(tokens)


@pytest.mark.parametrize("kind", FOLLOWED)
def test_known_decoders_are_followed_and_others_are_asked(kind: str) -> None:
    assert detokenizer(trained(kind)).bytes_of is not None
    assert all(detokenizer(trained(other)).bytes_of is None for other in ASKED)


@pytest.mark.day("metaspace")
@pytest.mark.parametrize("kind", FOLLOWED)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_text_goes_on_after_its_prompt(kind: str, data: st.DataObject) -> None:
    made, one = trained(kind), detokenizer(trained(kind))
    prompt = made.encode(data.draw(LETTERS.filter(lambda text: text[-1:].isascii()))).ids
    tokens = data.draw(ids(kind))
    before, whole = one.decode(prompt), one.decode(prompt + tokens)
    if prompt and (made.id_to_token(prompt[-1]) or "").startswith("<0x"):
        return  # a run of bytes over the boundary; below
    assert before + "".join(pieces(one, tokens, prompt)) == whole


def test_a_character_that_the_prompt_begins_belongs_to_the_text() -> None:
    for kind in ("llama", "gemma"):
        byte = {i: trained(kind).token_to_id(f"<0x{i:02X}>") for i in range(256)}
        prompt = [byte[b] for b in "\U0001f600\u20ac".encode()]
        one = detokenizer(trained(kind))
        assert "".join(pieces(one, prompt[-1:], prompt[:-1])) == "\u20ac"
        assert "".join(pieces(one, [byte[0xFF]], prompt)) == "\ufffd"
        assert "".join(pieces(one, [byte[0x41]], prompt)) == "A"
    one = detokenizer(ByteTokenizer())
    assert pieces(one, b"\xac!", b"\xe2\x82") == ["\u20ac", "!", ""]


def test_pieces_come_as_soon_as_they_are_certain() -> None:
    made = trained("byte level")
    tokens = made.encode("caf\u00e9 \U0001f600").ids
    got = pieces(detokenizer(made), tokens)
    assert got[-1] == "" and not any("\ufffd" in piece for piece in got)
    assert sum(map(bool, got)) >= 4
    byte = {i: trained("llama").token_to_id(f"<0x{i:02X}>") for i in range(256)}
    run = [byte[b] for b in (0xE2, 0x82, 0xFF, 0x41)]
    assert pieces(detokenizer(trained("llama")), run) == ["", "", "\ufffd" * 3, "\ufffd", ""]


@pytest.mark.parametrize("kind", ["byte level", "llama", "words"])
def test_tokenizers_of_transformers(kind: str) -> None:
    transformers: Any = pytest.importorskip("transformers")
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=trained(kind), bos_token="<s>", eos_token="</s>")
    one = detokenizer(made)
    tokens = [made.bos_token_id, *made.encode("the cat  sat"), made.eos_token_id]
    text = made.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(pieces(one, tokens)) == text == one.decode(tokens)


class Halves:
    """Ids are half bytes."""

    vocab_size = 16

    def decode(self, ids: Sequence[int]) -> str:
        pairs = zip(ids[::2], ids[1::2], strict=False)
        return bytes(16 * a + b for a, b in pairs).decode("utf-8", "replace") + "\ufffd" * (len(ids) % 2)


@example(tokens=[])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(tokens=st.lists(st.integers(0, 255), max_size=9))
def test_objects_that_decode_bytes(tokens: list[int]) -> None:
    assert "".join(pieces(detokenizer(ByteTokenizer()), tokens)) == bytes(tokens).decode("utf-8", "replace")


def test_any_object_that_decodes() -> None:
    one = detokenizer(Halves())
    tokens = [half for byte in "a\u00e9\U0001f600".encode() for half in divmod(byte, 16)]
    assert [piece for piece in pieces(one, tokens) if piece] == ["a", "\u00e9", "\U0001f600"]
    with pytest.raises(TypeError, match=r"tokenizer is a int. Pass one of transformers"):
        detokenizer(3)


def test_digests_differ_with_the_vocabulary() -> None:
    kinds = [detokenizer(trained(kind)) for kind in FOLLOWED + ASKED] + [detokenizer(Halves())]
    assert len({one.digest for one in kinds}) == len(kinds)
    assert detokenizer(kinds[0]) is kinds[0]
    assert all(one.decode([0]) == "" for one in kinds[:3]) and SPECIAL[0] == "<s>"
