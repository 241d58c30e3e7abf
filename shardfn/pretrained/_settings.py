"""The settings of a model to load: its files, dtype, codes, memories and drafter.

Files of models, read so that a message names a damaged or wrong file.

`generation_config.json` of a model: values of sampling recommended by the authors, where a user gives none.
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shardfn.core import MemoryKind
from shardfn.inference import Drafter, Jacobi, Limits, Ngram, Request, Sampling, Suffix, check_request
from shardfn.kernels import Activations, Quantization

CACHE_DTYPES = ("float32", "bfloat16", "int8", "fp8")
DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DRAFTERS: Mapping[str, Drafter | None] = {"none": None, "ngram": Ngram(), "suffix": Suffix(), "jacobi": Jacobi()}
_DRAFTS = 15
KINDS = {"run": "a run of examples/train_gpt.py", "files": "files of Hugging Face", "gguf": "a GGUF file"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Settings of a model and of its engine.

    Attributes:
        model: path of the model.
        kind: key of `KINDS`.
        context: largest number of tokens of a sequence. None is the model's.
        cache_gib: limit in GiB of the KV cache, on all ranks together.
        ranks: number of ranks of tensor parallelism.
        dtype: key of `DTYPES`.
        weights: codes of weights of linear layers, "int8" or "int4". None is `dtype`.
        activations: rounding of the inputs of layers in codes, "int8". None rounds nothing.
        memory: memory of weights between uses.
        fit: text to which codes are fitted, or None.
        disk: directory for "disk". None is a temporary directory.
        cache: dtype of the KV cache. None is `dtype`.
        cache_memory: memory of keys and values between uses.
        drafter: key of `DRAFTERS`, for speculative decoding.
        draft_model: path of a smaller model that guesses, or None.
        speculator: directory of a speculator that guesses, or None.
        branches: branches of a speculator's trees. 1 proposes chains.
        adapter: directory of `peft`, or None.
        generation_config: source of defaults: "auto" takes values from the model's `generation_config.json`, and "none"
            ignores the file.
        recommended: values of sampling from this file, defaults for the user's.
        reward_head: whether the first logit of the model is a reward.
        classifies: whether a model of sequence classification may be loaded.
    """

    model: str
    kind: str
    context: int | None = None
    cache_gib: float = 1.0
    ranks: int = 1
    dtype: str = "float32"
    weights: Quantization | None = None
    activations: Activations | None = None
    fit: str | None = None
    memory: MemoryKind = "device"
    disk: str | None = None
    cache: str | None = None
    cache_memory: MemoryKind = "device"
    drafter: str = "none"
    adapter: str | None = None
    draft_model: str | None = None
    speculator: str | None = None
    branches: int = 1
    generation_config: str = "auto"
    recommended: Mapping[str, float] = dataclasses.field(default_factory=dict)
    reward_head: bool = False
    classifies: bool = False

    @property
    def drafts(self) -> int:
        """Returns the number of guessed rows for each row."""
        guesses = self.drafter != "none" or self.draft_model is not None or self.speculator is not None
        return _DRAFTS if guesses else 0


class Problem(str):
    """Message in place of a value."""


def detect_kind(path: pathlib.Path) -> Any:
    """Returns the kind of model at a path, as a key of `KINDS`, or else a message with the remedy."""
    if path.is_file():
        with open(path, "rb") as file:
            first = file.read(4)
        return "gguf" if first == b"GGUF" else Problem(f"MODEL {path} is a file of {first!r}..., and no GGUF file")
    if not path.is_dir():
        hint = f"hf download {path} --local-dir {path.name}"
        return Problem(f"MODEL {path} does not exist; a model of Hugging Face is fetched first: {hint}")
    if find_run(path) is not None:
        return "run"
    if (path / "config.json").is_file():
        tokenizers = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
        if any((path / name).is_file() for name in tokenizers):
            return "files"
        return Problem(f"MODEL {path} has no tokenizer; tokenizer.save_pretrained({str(path)!r}) writes one")
    if (path / "model/config.json").is_file():
        return Problem(f"MODEL {path} is a run of shardfn finetune; its model is {path / 'model'}")
    if (path / "checkpoints").is_dir():
        return Problem(f"MODEL {path} has checkpoints, and no model.json, which examples/train_gpt.py writes")
    if (path / "metrics.jsonl").is_file():
        return Problem(f"MODEL {path} is a run without checkpoints; train again with --save-every 100")
    has = ", ".join(sorted(p.name for p in path.iterdir())[:4]) or "no files"
    return Problem(f"MODEL {path} has neither config.json nor model.json; it has {has}")


def find_run(path: pathlib.Path) -> pathlib.Path | None:
    """Returns the run at this path, or the run with a checkpoint at this path, or None."""
    places = (path, path.absolute().parent, path.absolute().parent.parent)
    return next((place for place in places if (place / "model.json").is_file()), None)


def read_json_object(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
        ValueError: the file is not JSON, or not an object. The message names the file.
    """
    with name_file_in_errors(path, "its JSON"):
        found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path} must contain a JSON object, got a {type(found).__name__}.")
    return found


@contextlib.contextmanager
def name_file_in_errors(path: pathlib.Path, part: str) -> Iterator[None]:
    """Turns errors of packages that read a model's files into refusals that name the files.

    Args:
        path: path of the model.
        part: words for the part to read.

    Raises:
        ValueError: has the path, the part and the error.
    """
    try:
        yield
    except (OSError, ImportError):
        raise
    except Exception as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        text = " ".join(str(error).split())
        raise ValueError(f"{path}: {part} cannot be read: {kind}{text}") from error


GENERATION_CONFIG = "generation_config.json"
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MANY = 1 << 40
_ANYTHING = Limits(vocab=_MANY, context=_MANY, blocks=_MANY)


def read_sampling(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the values of `Sampling` in a model's directory, or an empty dict without the file.

    Raises:
        ValueError: a value is out of range. The message names the file, the value and the remedy.
    """
    path = folder / GENERATION_CONFIG
    given = read_json_object(path) if path.is_file() else {}
    found = {name: given[name] for name in SAMPLING_FIELDS if given.get(name) is not None}
    if found.get("top_k") == -1:  # all tokens, in vLLM's words
        found["top_k"] = 0
    try:
        check_request(Request((0,), dataclasses.replace(Sampling(), **found)), _ANYTHING)
    except ValueError as error:
        raise ValueError(
            f"{path}: {str(error).removesuffix('.')}. Correct the file, or pass --generation-config none."
        ) from error
    return found


def describe_sampling(found: Mapping[str, float]) -> str:
    """Returns the values in words, and the source.

    Example:
        >>> describe_sampling({"temperature": 0.6, "top_p": 0.95})
        'sampling of generation_config.json, where none is given: temperature 0.6, top_p 0.95'
    """
    values = ", ".join(f"{name} {value}" for name, value in found.items())
    return f"sampling of {GENERATION_CONFIG}, where none is given: {values}"
