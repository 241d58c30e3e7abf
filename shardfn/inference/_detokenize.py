"""The text of tokens that arrive in sequence: the pieces joined are the decoding of all tokens.

A piece is given as soon as no later token can change the piece. Where a vocabulary has one token for each byte, a piece
ends with a character. Where single bytes are only a fallback, a piece ends with the run of such bytes, since one wrong
byte spoils the whole run. Decoders of other kinds are asked for the text of a short window, as Text Generation
Inference [1] does.

References:
    [1] Hugging Face, Text Generation Inference, 2023, https://github.com/huggingface/text-generation-inference
"""

import codecs
import functools
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from shardfn.data import BPETokenizer, ByteTokenizer

_HALF = "\ufffd"  # decoders write the mark for bytes without a character, such as the first bytes of a longer character
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class DecodeStream(Protocol):
    """Text of a single sequence."""

    def add(self, token: int) -> str:
        """Returns the further text that is certain with this token."""
        ...

    def end(self) -> str:
        """Returns the text that was held back."""
        ...

    def close(self) -> None:
        """Discards the text that was held back, except for an unfinished character."""
        ...


@dataclass(frozen=True)
class Detokenizer:
    """Tokenizer's way from tokens to text, made by `detokenizer`.

    Attributes:
        size: number of ids. Ids from `size` on have no text.
        decode: function from all tokens at once to their text.
        empty: maker of the text of a sequence that has no token yet.
        bytes_of: bytes of a token by its id, with None for a token without bytes. None for a tokenizer whose tokens
            depend on their neighbours.
        digest: digest of the vocabulary, equal on all ranks.
        encode: function from a text to its token ids, without special tokens. None for a tokenizer that only decodes.
    """

    size: int
    decode: Callable[[Sequence[int]], str]
    empty: Callable[[], DecodeStream]
    bytes_of: Callable[[int], bytes | None] | None
    digest: bytes
    encode: Callable[[str], list[int]] | None = None

    def start(self, prompt: Sequence[int] = ()) -> DecodeStream:
        """Returns the text after a prompt. A character that begins in the prompt belongs to the text.

        Example:
            >>> growing = detokenizer(ByteTokenizer()).start([65, 0xC3])
            >>> growing.add(0xA9), growing.add(0xC3), growing.end()
            ('é', '', '�')
        """
        growing = self.empty()
        for token in prompt:
            growing.add(token)
        growing.close()
        return growing


def detokenizer(tokenizer: Any, *, special: bool = False) -> Detokenizer:
    """Returns the detokeniser of a tokenizer.

    Args:
        tokenizer: tokenizer of `tokenizers`, of transformers, or of `shardfn.data`, or any object with a `vocab_size`
            and a `decode(ids)`, or a list with the bytes of each id and None for special ids, or a `Detokenizer`,
            returned as given.
        special: whether special tokens have a text.

    Raises:
        TypeError: the object is not a tokenizer.

    Example:
        >>> one = detokenizer(ByteTokenizer())
        >>> growing = one.start()
        >>> [growing.add(token) for token in "Aé".encode()]
        ['A', '', 'é']
        >>> one.decode(list("Aé".encode()))
        'Aé'
    """
    if isinstance(tokenizer, Detokenizer):
        return tokenizer
    return replace(_make_detokenizer(tokenizer, special), encode=_find_encode(tokenizer))


def _find_encode(tokenizer: Any) -> Callable[[str], list[int]] | None:
    """Returns the way from a text to token ids without special tokens, if there is one."""
    encode = getattr(tokenizer, "encode", None)
    if encode is None:
        return None
    if hasattr(tokenizer, "id_to_token"):  # of `tokenizers`
        return lambda text: encode(text, add_special_tokens=False).ids
    if hasattr(tokenizer, "all_special_ids"):  # of transformers
        return lambda text: encode(text, add_special_tokens=False)
    return lambda text: list(map(int, encode(text)))


def _make_detokenizer(tokenizer: Any, special: bool) -> Detokenizer:
    if isinstance(tokenizer, ByteTokenizer):
        return _make_byte_detokenizer([bytes([i]) for i in range(tokenizer.vocab_size)])
    if isinstance(tokenizer, list | tuple) and all(x is None or isinstance(x, bytes) for x in tokenizer):
        return _make_byte_detokenizer(tokenizer)
    inner = (
        tokenizer.inner if isinstance(tokenizer, BPETokenizer) else getattr(tokenizer, "backend_tokenizer", tokenizer)
    )
    if hasattr(inner, "id_to_token") and hasattr(inner, "to_str"):
        return _make_library_detokenizer(inner, special)
    if not hasattr(tokenizer, "decode") or not hasattr(tokenizer, "vocab_size"):
        raise TypeError(
            f"tokenizer is a {type(tokenizer).__name__}. Pass one of transformers, of tokenizers or of shardfn.data, an"
            " object with vocab_size and decode(ids), or a list with the bytes of each id."
        )
    return _make_window_detokenizer(tokenizer, special)


def _make_byte_detokenizer(tokens: Sequence[bytes | None]) -> Detokenizer:
    size = len(tokens)

    def bytes_of(token: int) -> bytes | None:
        return tokens[token] if token < size else None

    def decode_ids(ids: Sequence[int]) -> str:
        return b"".join(bytes_of(token) or b"" for token in ids).decode("utf-8", "replace")

    digest = hashlib.blake2b(repr(tokens).encode(), digest_size=8).digest()
    return Detokenizer(size, decode_ids, lambda: _OfBytes(bytes_of), bytes_of, digest)


def _make_library_detokenizer(inner: Any, special: bool) -> Detokenizer:
    """Returns the detokenizer of a tokenizer of `tokenizers`."""
    added = inner.get_added_tokens_decoder()
    skipped = frozenset() if special else frozenset(i for i, token in added.items() if token.special)
    size = 1 + max(inner.get_vocab(with_added_tokens=True).values(), default=-1)

    def token_of(token: int) -> str | None:
        return None if token in skipped or token >= size else inner.id_to_token(token)

    def decode_ids(ids: Sequence[int]) -> str:
        return inner.decode(list(ids), skip_special_tokens=not special)

    given = None if inner.decoder is None else json.loads(inner.decoder.__getstate__())
    steps = _flatten_decoders(given) if given else []
    digest = hashlib.blake2b(inner.to_str().encode(), digest_size=8).digest()
    if [step["type"] for step in steps] == ["ByteLevel"]:
        spelled = functools.cache(lambda token: _byte_level(token_of(token)))
        return Detokenizer(size, decode_ids, lambda: _OfBytes(spelled), _skip_special(spelled, added), digest)
    rule = _read_rule(steps)
    if rule is None:
        return Detokenizer(size, decode_ids, lambda: _OfWindows(decode_ids), None, digest)
    piece = functools.cache(lambda token: rule.piece(token_of(token)))
    first = functools.cache(lambda token: rule.first(token_of(token)))
    bytes_of = functools.cache(lambda token: _encode_piece(piece(token)))
    return Detokenizer(
        size, decode_ids, lambda: _OfPieces(piece, first, rule.strip), _skip_special(bytes_of, added), digest
    )


def _make_window_detokenizer(tokenizer: Any, special: bool) -> Detokenizer:
    """Returns the detokenizer of any object that decodes, such as a tokenizer of transformers in Python."""
    size = tokenizer.vocab_size
    options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
    options = options if hasattr(tokenizer, "all_special_ids") else {}

    def decode_ids(ids: Sequence[int]) -> str:
        return tokenizer.decode([token for token in ids if token < size], **options)

    whole = hashlib.blake2b(digest_size=8)
    for token in range(size):
        whole.update(decode_ids([token]).encode("utf-8", "replace") + b"\0")
    return Detokenizer(size, decode_ids, lambda: _OfWindows(decode_ids), None, whole.digest())


def _skip_special(bytes_of: Callable[[int], bytes | None], added: Any) -> Callable[[int], bytes | None]:
    """Returns `bytes_of` with None for special tokens: special tokens have no bytes, though they may have a text."""
    return lambda token: None if token in added and added[token].special else bytes_of(token)


# Bytes for each token.


class _OfBytes:
    def __init__(self, bytes_of: Callable[[int], bytes | None]) -> None:
        self._bytes_of, self._decoder = bytes_of, codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(self._bytes_of(token) or b"")

    def end(self) -> str:
        return self._decoder.decode(b"", True)

    def close(self) -> None:
        pass


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Returns the bytes that the characters of a byte-level vocabulary mean.

    Printable characters mean themselves. The other bytes have characters from 256 up.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level(token: str | None) -> bytes | None:
    if token is None:
        return None
    alphabet = _byte_alphabet()
    if all(c in alphabet for c in token):
        return bytes(alphabet[c] for c in token)
    return token.encode()


# A text for each token, with single bytes as a fallback.


@dataclass(frozen=True)
class _Rule:
    """Decoders that treat each token by itself: replacements, the first token's, bytes, and spaces at the start."""

    replaced: tuple[tuple[str, str], ...] = ()
    metaspace: str = ""
    drops: bool = False  # whether the first token loses its metaspaces
    fallback: bool = False
    strip: tuple[str, int] = (" ", 0)

    def piece(self, token: str | None) -> str | int | None:
        """Returns the text of a token, or a byte, or None for a skipped token."""
        if token is None:
            return None
        for old, new in self.replaced:
            token = token.replace(old, new)
        found = _BYTE.fullmatch(token) if self.fallback else None
        if found is not None:
            return int(found[1], 16)
        return token.replace(self.metaspace, " ") if self.metaspace else token

    def first(self, token: str | None) -> str | int | None:
        """Returns the same as `piece` for the first token of a text."""
        return self.piece(token.replace(self.metaspace, "") if token is not None and self.drops else token)


def _flatten_decoders(decoder: Any) -> list[Any]:
    return (
        [s for d in decoder["decoders"] for s in _flatten_decoders(d)] if decoder["type"] == "Sequence" else [decoder]
    )


def _read_rule(steps: Sequence[Any]) -> _Rule | None:
    """Returns the rule of a chain of decoders of the form Metaspace, or Replace*, ByteFallback?, (Fuse, Strip?)?."""
    if [step["type"] for step in steps] == ["Metaspace"]:
        return _Rule(metaspace=steps[0]["replacement"], drops=steps[0]["prepend_scheme"] != "never")
    left, replaced = list(steps), []
    while left and left[0]["type"] == "Replace" and "String" in left[0]["pattern"]:
        step = left.pop(0)
        replaced.append((step["pattern"]["String"], step["content"]))
    fallback = bool(left) and left[0]["type"] == "ByteFallback"
    left = left[fallback:]
    strip = (" ", 0)
    if [step["type"] for step in left] == ["Fuse", "Strip"] and not left[1]["stop"]:
        strip, left = (left[1]["content"], left[1]["start"]), []
    known = steps and (not left or [step["type"] for step in left] == ["Fuse"])
    return _Rule(tuple(replaced), fallback=fallback, strip=strip) if known else None


def _encode_piece(piece: str | int | None) -> bytes | None:
    return bytes([piece]) if isinstance(piece, int) else None if piece is None else piece.encode()


_Piece = Callable[[int], str | int | None]


class _OfPieces:
    """Text by pieces. A run of single bytes is held until the run ends: it is a text, or one mark for each byte."""

    def __init__(self, piece: _Piece, first: _Piece, strip: tuple[str, int]) -> None:
        self._piece, self._first, (self._content, self._strip) = piece, first, strip
        self._begun = False
        self._text, self._count, self._broken = "", 0, False  # of the run
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def add(self, token: int) -> str:
        piece = (self._piece if self._begun else self._first)(token)
        if piece is None:
            return ""
        self._begun = True
        return self._strip_start(self._add_byte(piece) if isinstance(piece, int) else self._end_run() + piece)

    def end(self) -> str:
        return self._strip_start(self._end_run())

    def close(self) -> None:
        half = b"" if self._broken else self._decoder.getstate()[0]
        self._reset_run()
        for byte in half:
            self._add_byte(byte)

    def _add_byte(self, byte: int) -> str:
        self._count += 1
        if self._broken:
            return _HALF
        try:
            self._text += self._decoder.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._broken = True
            return _HALF * self._count
        return ""

    def _end_run(self) -> str:
        """Returns the text of the run, and ends the run."""
        half = len(self._decoder.getstate()[0]) if not self._broken else 0
        text = "" if self._broken else _HALF * self._count if half else self._text
        self._reset_run()
        return text

    def _reset_run(self) -> None:
        self._text, self._count, self._broken = "", 0, False
        self._decoder.reset()

    def _strip_start(self, text: str) -> str:
        while text and self._strip:
            if text[0] != self._content:
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text


# Any decoder.


class _OfWindows:
    """Text of a window of tokens. The first tokens' text was given, so only the growth of the text is new."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given, self._before = 0, ""  # tokens of the window with given text, and the given text

    def add(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(_HALF) or not text.startswith(self._before) or len(text) == len(self._before):
            return ""
        piece = text[len(self._before) :]
        self._window = self._window[self._given :]
        self._given, self._before = len(self._window), self._decode(self._window)
        return piece

    def end(self) -> str:
        text = self._decode(self._window)
        same = next((i for i, (a, b) in enumerate(zip(text, self._before, strict=False)) if a != b), len(self._before))
        self._before, self._given = text, len(self._window)
        return text[same:]

    def close(self) -> None:
        pass
