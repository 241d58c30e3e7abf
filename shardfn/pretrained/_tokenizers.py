"""Tokenizers of models: directories of Hugging Face, GGUF files, and runs of examples/train_gpt.py.

Byte-level tokenizers of GGUF files need only the package `tokenizers`: transformers takes seconds to import.
"""

import functools
import importlib
import importlib.util
import pathlib
from typing import Any

from shardfn.data import BPETokenizer, ByteTokenizer
from shardfn.interop import GGUFFile

from ._settings import ModelSettings, find_run, name_file_in_errors, read_json_object
from ._text import ModelText, compile_chat_template, wrap_data_tokenizer, wrap_transformers_tokenizer

FILES_ALONE = {"trust_remote_code": False}  # without it transformers asks the user, and waits
_TOKENIZER_KEYS = "model_type", "tokenizer_class"  # of config.json and of tokenizer_config.json
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
    return isinstance(given, list) and {*map(type, given)} <= {str}


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


def load_text(job: ModelSettings) -> ModelText:
    """Loads only a model's tokenizer. The ends of GGUF files are the tokenizer's, not the model's.

    Raises:
        OSError: a file is missing.
        ImportError: a package is missing. The message has the installation.
    """
    path = pathlib.Path(job.model)
    if job.kind == "run":
        run = find_run(path)
        assert run is not None
        return wrap_data_tokenizer(load_run_tokenizer(run, read_json_object(run / "model.json")))
    return load_gguf_text(GGUFFile(path)) if job.kind == "gguf" else wrap_transformers_tokenizer(load_tokenizer(path))


def load_run_tokenizer(run: pathlib.Path, given: dict[str, Any]) -> ByteTokenizer | BPETokenizer:
    name = given.get("tokenizer")
    if not isinstance(name, str):
        raise ValueError(f"{run / 'model.json'}: tokenizer must be 'bytes', or a file's name, got {name!r:.60}.")
    with name_file_in_errors(run / name, "its tokenizer"):
        return ByteTokenizer() if name == "bytes" else BPETokenizer.load(run / name)


def import_transformers(path: pathlib.Path) -> Any:
    if importlib.util.find_spec("transformers") is None:
        raise ImportError(f"{path}: its tokenizer is read by transformers, which is missing: pip install 'shardfn[hf]'")
    return importlib.import_module("transformers")


def load_tokenizer(path: pathlib.Path) -> Any:
    """Loads the tokenizer of a directory of transformers.

    Raises:
        OSError: a file is missing.
        ImportError: transformers is missing. The message has the installation.
    """
    transformers = import_transformers(path)
    with name_file_in_errors(path, "its tokenizer"):
        return transformers.AutoTokenizer.from_pretrained(path, config=_tokenizer_config(path), **FILES_ALONE)


def _tokenizer_config(path: pathlib.Path) -> Any:
    """Returns a config with all that the choice of the tokenizer's class needs, or None if the choice needs more.

    transformers would take the model's config, whose import takes longer than the rest of the tokenizer.
    """
    files = [path / name for name in ("config.json", "tokenizer_config.json")]
    if not all(file.is_file() for file in files):
        return None
    kind, name = (read_json_object(file).get(key) for file, key in zip(files, _TOKENIZER_KEYS, strict=True))
    if not isinstance(kind, str) or not isinstance(name, str):
        return None
    config = import_transformers(path).PreTrainedConfig(name_or_path=str(path))
    config.model_type = kind
    return config


def load_gguf_text(file: GGUFFile) -> ModelText:
    ends = (file.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    given = frozenset(x for x in ends if type(x) is int)
    return load_byte_level(file, given) or wrap_transformers_tokenizer(_load_gguf_tokenizer(file.path), given)


def _load_gguf_tokenizer(path: pathlib.Path) -> Any:
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f"{path}: transformers needs the package gguf to read its tokenizer: pip install gguf")
    transformers = import_transformers(path)
    with name_file_in_errors(path, "its tokenizer"):  # AutoTokenizer would read the whole file, for a config
        return transformers.PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)


def read_stop_tokens(path: pathlib.Path) -> frozenset[int]:
    """Returns the tokens that end a text by a file of configuration, if present.

    Raises:
        ValueError: the tokens are not integers.
    """
    value = read_json_object(path).get("eos_token_id") if path.is_file() else None
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(x) is not int for x in tokens):
        raise ValueError(f"{path}: eos_token_id must be a token, an integer, or a list of tokens, got {value!r:.60}.")
    return frozenset(tokens)


def _list_ids(value: int | list[int] | None) -> frozenset[int]:
    return frozenset() if value is None else frozenset([value] if isinstance(value, int) else value)
