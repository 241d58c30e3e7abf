"""Byte-level tokenizers of GGUF files, made by the package `tokenizers` alone: transformers takes seconds to import."""

import functools
import importlib.util
from typing import Any

from shardfn.interop import GGUFFile

from ._text import ModelText, compile_chat_template

# Kinds of tokens in a file.
_CONTROL, _USER_DEFINED = 3, 4
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Regular expressions by which a text is cut into words, by the file's name of them. Others have GPT-2's.
_SPLITS: dict[str, str] = dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), _LLAMA3)
_SPLITS |= dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _LLAMA3.replace("{1,3}", ""))
_PLAIN = (None, "default", "gpt-2", "smollm")
_SINGLE_DIGITS = ("smollm",)


def load_byte_level(file: GGUFFile, ends: frozenset[int]) -> ModelText | None:
    """Returns the tokenizer of a GGUF file, with the ids of transformers' tokenizer of the file.

    Except that digits of SmolLM are single words, as in the tokenizer of the model, which transformers does not know.

    None for a file whose tokenizer is not byte-level BPE or cuts words in another way, and without `tokenizers`.

    Args:
        file: file of a model.
        ends: tokens that end a completion, by the file.
    """
    fields, pre = file.fields, file.fields.get("tokenizer.ggml.pre")
    if fields.get("tokenizer.ggml.model") != "gpt2" or pre not in (*_PLAIN, *_SPLITS):
        return None
    if importlib.util.find_spec("tokenizers") is None:
        return None
    tokens: Any = fields.get("tokenizer.ggml.tokens")
    merges: Any = fields.get("tokenizer.ggml.merges")
    if not _are_texts(tokens) or not _are_texts(merges) or len(set(tokens)) < len(tokens):
        return None
    special = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()}
    special = {name: tokens[i] for name, i in special.items() if type(i) is int and 0 <= i < len(tokens)}
    try:
        tokenizer = _make_tokenizer(fields, tokens, merges, pre, special)
        source = fields.get("tokenizer.chat_template")
        chat = (
            None
            if source is None
            else functools.partial(compile_chat_template(source), tools=None, documents=None, **special)
        )
    except Exception:  # transformers' message is the better one
        return None
    begin = _find_edge(fields, tokenizer, special, "bos")
    end = _find_edge(fields, tokenizer, special, "eos")

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    own = {tokenizer.token_to_id(special["eos_token"])} if "eos_token" in special else set()
    return ModelText(
        size=1 + max(tokenizer.get_vocab().values(), default=-1),
        encode=lambda text: [*begin, *encode(text), *end],
        plain=encode,
        tokenizer=tokenizer,
        token=tokenizer.token_to_id,
        chat=chat,
        ends=ends | own,
        template=source or "",
    )


_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _are_texts(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(x, str) for x in given)


def _find_edge(fields: Any, tokenizer: Any, special: dict[str, str], name: str) -> list[int]:
    """Returns the tokens that stand before ("bos") or after ("eos") each text."""
    wanted = fields.get(f"tokenizer.ggml.add_{name}_token") is True and f"{name}_token" in special
    return [tokenizer.token_to_id(special[f"{name}_token"])] if wanted else []


def _make_tokenizer(fields: Any, tokens: list[str], merges: list[str], pre: str | None, special: dict[str, str]) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    alphabet = {*pre_tokenizers.ByteLevel.alphabet()}
    kinds = fields.get("tokenizer.ggml.token_type") or ()
    spelled = [token if alphabet.issuperset(token) else _spell(token) for token in tokens]
    pairs: Any = [tuple(merge.split(" ")) for merge in merges]
    model: Any = models.BPE(vocab={token: i for i, token in enumerate(spelled)}, merges=pairs, fuse_unk=False)
    made = Tokenizer(model)
    bytes_alone: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _SPLITS)
    split = _SPLITS.get(pre or "")
    words: Any = [] if split is None else [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    words += [pre_tokenizers.Digits(individual_digits=True)] if pre in _SINGLE_DIGITS else []
    made.pre_tokenizer = pre_tokenizers.Sequence([*words, bytes_alone])  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    control = [t for t, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL and alphabet.issuperset(t)]
    known = {*spelled}
    user = [t for t, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED and t in known]
    made.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in (*control, *special.values())])
    made.add_tokens([AddedToken(t, normalized=False, special=False) for t in user])
    return made


def _spell(token: str) -> str:
    """Returns a text in the byte-level alphabet, in which each byte is a printable character."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    letters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}
    return "".join(letters[byte] for byte in token.encode())
