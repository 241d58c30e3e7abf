"""Loads models for an engine: files of Hugging Face, a GGUF file, or a run of examples/train_gpt.py."""

import atexit
import dataclasses
import functools
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from shardfn.checkpoint import restore
from shardfn.core import (
    Disk,
    Mesh,
    PyTree,
    first_of,
    is_device,
    is_disk,
    key,
    make_mesh,
    tree_leaves,
    tree_map,
)
from shardfn.inference import (
    Activation,
    Classes,
    Classifier,
    DecisionLog,
    Decoder,
    Drafter,
    DraftModel,
    Engine,
    Limits,
    decoder,
    fit_quantization,
    hf_decoder,
    limits_of,
    seq2seq_decoder,
)
from shardfn.interop import (
    IMAGES_RULE,
    SEQ2SEQ_TYPES,
    GGUFFile,
    check_sizes,
    classifier_from_hf,
    gguf_config,
    gpt_config,
    gpt_from_gguf,
    gpt_from_hf,
    is_classifier,
    seq2seq_from_hf,
)
from shardfn.interop.leaves import gather_leaf
from shardfn.interop.quantized import read_quantization
from shardfn.kernels import GROUP
from shardfn.lora import load_peft
from shardfn.models import gpt
from shardfn.speculators import Hybrid, Speculator
from shardfn.speculators import load as load_speculator
from shardfn.transforms import eval_shape, sharded

from ._module import HFModule, load_module, make_module
from ._settings import (
    DRAFTERS,
    DTYPES,
    GENERATION_CONFIG,
    ModelSettings,
    describe_sampling,
    detect_kind,
    find_run,
    name_file_in_errors,
    read_json_object,
)
from ._text import ModelText, wrap_data_tokenizer, wrap_transformers_tokenizer
from ._tokenizers import (
    load_gguf_text,
    load_run_tokenizer,
    load_tokenizer,
    read_stop_tokens,
)

AXIS = "tp"


class LoadedModel(NamedTuple):
    """Model with a tokenizer.

    Attributes:
        decoder: decoder for an engine.
        params: parameters of the decoder.
        text: tokenizer of the model.
        inexact: reason why the model is not batch-invariant, empty if batch-invariant.
        size: number of parameters.
        coded: remark on weights in codes.
        plain: function that makes the decoder of the same weights without codes, for a single rank. None unless codes
            are fitted.
        classifier: classification head, or None.
    """

    decoder: Decoder
    params: PyTree
    text: ModelText
    inexact: str
    size: int
    coded: str = ""
    plain: Callable[[], Decoder] | None = None
    classifier: Classifier | None = None


def load_model(job: ModelSettings, mesh: Mesh) -> LoadedModel:
    """Loads a model. Collective.

    Args:
        job: job with the model's name.
        mesh: mesh of the ranks.

    Raises:
        ValueError: the model cannot be served, or its tokenizer has more tokens.
        OSError: a file is missing, or damaged.
        ImportError: a package is missing. The message has the installation.
    """
    path = pathlib.Path(job.model)
    made = _load_model(path, job, mesh)
    if job.reward_head:
        made = made._replace(classifier=_take_reward_head(made, path))
    if made.classifier is not None and not job.classifies:
        raise ValueError(
            f"{path} is a model of sequence classification, which has no logits of tokens; serve it by shardfn serve,"
            " or call LLM(...).classify"
        )
    if made.text.size > made.decoder.vocab:
        raise ValueError(
            f"the tokenizer of {path} has {made.text.size} tokens, and the model has {made.decoder.vocab}. Use the"
            " tokenizer that the model was trained with."
        )
    if wrong := sorted(x for x in made.text.ends if not 0 <= x < made.decoder.vocab):
        raise ValueError(
            f"{path}: eos_token_id must be a token of the model, from 0 to {made.decoder.vocab - 1}, got {wrong[0]}."
        )
    if made.plain is None:
        return made
    params, remark = _fit_codes(job, made.params, made.text, made.plain())
    return made._replace(params=params, coded=", ".join(filter(None, (made.coded, remark))), plain=None)


def _load_model(path: pathlib.Path, job: ModelSettings, mesh: Mesh) -> LoadedModel:
    if job.kind == "run":
        return _load_run(path, job, mesh)
    if job.kind == "gguf":
        return _load_gguf(path, job, mesh)
    tokenizer = load_tokenizer(path)
    configs = ("config.json", GENERATION_CONFIG) if job.generation_config == "auto" else ("config.json",)
    text = wrap_transformers_tokenizer(
        tokenizer, frozenset[int]().union(*(read_stop_tokens(path / name) for name in configs))
    )
    return _load_files(path, job, mesh, text)


def _make_disk(job: ModelSettings) -> Disk | None:
    """Returns the directory for weights on disk. A temporary directory lasts as long as the process."""
    if not is_disk(job.memory):
        return None
    directory = job.disk or tempfile.mkdtemp(prefix="shardfn-weights-")
    if job.disk is None:
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Disk(directory)


def make_engine(
    job: ModelSettings,
    served: LoadedModel,
    limits: Limits,
    mesh: Mesh,
    adapters: Mapping[str, str],
    eager_steps: int = 0,
    *,
    decisions: DecisionLog | None = None,
) -> tuple[Engine, Drafter | None]:
    """Returns the engine of a loaded model, and the drafter. Collective.

    Args:
        job: job of the model.
        served: model from `load_model`.
        limits: limits of the engine.
        mesh: mesh of the ranks.
        adapters: directories of peft, by name.
        eager_steps: see `Engine`.
        decisions: see `Engine`.

    Raises:
        ValueError: see `load_model`.
        OSError: see `load_model`.
        ImportError: see `load_model`.
    """
    drafter = _load_drafter(job, limits, served)
    more: Any = {"tokenizer": served.text.tokenizer, "drafter": drafter, "weights": job.memory, "disk": _make_disk(job)}
    more |= {"cache": job.cache_memory, "eager_steps": eager_steps, "decisions": decisions}
    given = served.decoder, served.params
    given = drafter.prepare(*given) if isinstance(drafter, Speculator | Hybrid) else given
    engine = Engine(*given, mesh=mesh, limits=limits, **more)
    for name, place in adapters.items():
        engine.adapters.add(name, load_peft(place, served.params))
    return engine, drafter


def describe_engine(
    job: ModelSettings, served: LoadedModel, engine: Engine, drafter: Drafter | None, *, captured: bool = True
) -> str:
    """Returns the lines about a ready model: size, codes and place of weights, exactness and memory.

    Without captured graphs the memory is that of the weights and the cache.
    """
    pairs = ("on", job.memory), ("cache on", job.cache_memory)
    places = [f"{on} {kind}" for on, kind in pairs if not is_device(kind)]
    rounded = job.activations and f"activations in {job.activations}"
    kinds = ", ".join(filter(None, (job.weights, served.coded, job.dtype, rounded, *places)))
    how = f"not batch-invariant: {served.inexact}" if served.inexact else "batch-invariant"
    memory = (
        str(engine.memory()) if captured else str(engine.runner.held_memory(engine.core.weights, engine.core.cache))
    )
    lines = [f"{job.model}: {served.size:,} parameters, {kinds}, {how}", memory]
    lines += [describe_sampling(job.recommended)] if job.recommended else []
    lines += [f"{job.draft_model}, which guesses: {drafter.memory()}"] if isinstance(drafter, DraftModel) else []
    lines += [f"{job.speculator} guesses: {drafter.describe()}"] if isinstance(drafter, Speculator | Hybrid) else []
    return "\n".join(lines)


def _load_drafter(job: ModelSettings, limits: Limits, served: LoadedModel) -> Drafter | None:
    """Returns the drafter of a job. Each rank has a whole draft model.

    Args:
        job: job with the model's name.
        limits: limits of the engine.
        served: model of the engine.

    Raises:
        ValueError: see `load_model`.
        OSError: see `load_model`.
        ImportError: see `load_model`.
    """
    if job.speculator is not None:
        made = load_speculator(job.speculator, served.decoder, served.params, branches=job.branches)
        return Hybrid(made) if job.drafter == "suffix" else made
    if job.draft_model is None:
        return DRAFTERS[job.drafter]
    kind = detect_kind(pathlib.Path(job.draft_model))
    small = dataclasses.replace(job, model=job.draft_model, kind=kind, ranks=1, adapter=None, draft_model=None)
    guessing = load_model(small, make_mesh({}, alone=True))
    sizes = limits_of(
        guessing.decoder,
        context=min(limits.context, guessing.decoder.context),
        cache_bytes=int(job.cache_gib * 2**30),
        running=limits.running,
        buckets=limits.buckets,
        cache_dtype=limits.cache_dtype,
    )
    return DraftModel(guessing.decoder, guessing.params, limits=sizes)


def _load_files(path: pathlib.Path, job: ModelSettings, mesh: Mesh, text: ModelText) -> LoadedModel:
    settings = read_json_object(path / "config.json")
    check_sizes(settings, path / "config.json")
    changes, inexact = _choose_batch_invariant(job)
    if is_classifier(settings):
        return _load_classifier(path, job, mesh, text)
    if settings.get("is_encoder_decoder") or settings.get("model_type") in SEQ2SEQ_TYPES:
        return _load_seq2seq(path, job, mesh, text)
    if job.adapter is not None:  # its files name the module's own weights
        return _load_unmodified(functools.partial(make_module, path, job), job, mesh, text)
    if settings.get("model_type") == "llava" and IMAGES_RULE not in settings:  # a models.gpt never draws image tokens
        return _load_unmodified(functools.partial(make_module, path, job), job, mesh, text)
    try:
        with name_file_in_errors(path / "config.json", "its model"):
            gpt_config(settings, **changes)
    except ValueError as error:
        if IMAGES_RULE in settings:  # which transformers ignores
            raise
        return _load_unmodified(functools.partial(make_module, path, job), job, mesh, text, error)
    with name_file_in_errors(path, "its weights"):
        config, params = gpt_from_hf(path, dtype=DTYPES[job.dtype], **changes)
        size, coded = _param_bytes(params), ""
        # Ranks cut these inputs, and must have whole blocks of codes.
        inputs = config.num_heads * config.head_dim, config.ff_dim
        whole = all(num // GROUP % job.ranks == 0 for num in inputs)
        if read_quantization(path) is not None and config.batch_invariant and whole:  # the same values, in less memory
            _, params = gpt_from_hf(path, dtype=DTYPES[job.dtype], keep_codes=True, **changes)
            num = sum(x.dtype == torch.uint8 for x in tree_leaves(params))
            coded = f"{num} weights in codes of the file's values" if num else ""
    return LoadedModel(_make_decoder(config, mesh, job), params, text, inexact, size, coded, _fit_decoder(config, job))


def _load_seq2seq(path: pathlib.Path, job: ModelSettings, mesh: Mesh, text: ModelText) -> LoadedModel:
    """Loads an encoder-decoder model. The text of a prompt is the encoder's."""
    asked = {"--weights": job.weights, "--activations": job.activations, "an adapter": job.adapter, "--fit": job.fit}
    if wrong := [name for name, value in asked.items() if value is not None]:
        raise ValueError(f"{path} is an encoder-decoder model, which takes no {' and no '.join(wrong)}. Leave it out.")
    with name_file_in_errors(path, "its weights"):
        config, params = seq2seq_from_hf(path, dtype=DTYPES[job.dtype])
    exact, inexact = _choose_batch_invariant(job)
    if exact and config.decoder.mlp == "gelu_erf":
        exact, inexact = {}, "gelu with the error function has no batch-invariant form"
    made = seq2seq_decoder(config, tp=_mesh_axis(mesh), batch_invariant=bool(exact))
    return LoadedModel(made, params, text, inexact, _param_bytes(params))


def _load_classifier(path: pathlib.Path, job: ModelSettings, mesh: Mesh, text: ModelText) -> LoadedModel:
    """Loads a model of sequence classification with a decoder of `models.gpt`."""
    if job.adapter is not None:
        raise ValueError(f"{path} is a model of sequence classification, which takes no adapter; merge it first")
    changes, inexact = _choose_batch_invariant(job)
    settings = read_json_object(path / "config.json")
    with name_file_in_errors(path, "its weights"):
        config, params, weight_CD = classifier_from_hf(path, dtype=DTYPES[job.dtype], **changes)
    classifier = Classifier(weight_CD, _read_classes(settings, path, len(weight_CD)))
    made = _make_decoder(config, mesh, job)
    size = _param_bytes(params)
    return LoadedModel(made, params, text, inexact, size, plain=_fit_decoder(config, job), classifier=classifier)


def _take_reward_head(made: LoadedModel, path: pathlib.Path) -> Classifier:
    """Returns the first row of a model's head, whose logit is the reward of a reward model from `rl`. Collective."""
    head = made.params.get("head") if isinstance(made.params, dict) else None
    if made.classifier is not None or head is None or not head.dtype.is_floating_point:
        text = f"{path} with --reward-head: its head must be a table of floats apart from the embeddings, whose first"
        raise ValueError(f"{text} row gives the reward. Leave out --reward-head, or serve a reward model")
    whole = gather_leaf(head)
    return Classifier(whole[:1].float().clone(), Classes(("reward",), "identity"))


_ACTIVATIONS: Mapping[str, Activation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


def _read_classes(settings: Mapping[str, Any], path: pathlib.Path, num: int) -> Classes:
    """Returns the classes of a `config.json`: without `problem_type` a single class has a sigmoid, as at vLLM."""
    names = settings.get("id2label") or {}
    if not isinstance(names, Mapping) or (names and set(names) != {str(i) for i in range(num)}):
        raise ValueError(f"{path / 'config.json'}: id2label must have the keys 0 to {num - 1}, got {sorted(names)}.")
    kind = settings.get("problem_type")
    if kind is not None and kind not in _ACTIVATIONS:
        known = ", ".join(map(repr, _ACTIVATIONS))
        raise ValueError(f"{path / 'config.json'}: problem_type must be one of {known}, or null, got {kind!r:.60}.")
    labels = tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(num))
    return Classes(labels, _ACTIVATIONS[kind] if kind else "sigmoid" if num == 1 else "softmax")


def _load_gguf(path: pathlib.Path, job: ModelSettings, mesh: Mesh) -> LoadedModel:
    file = GGUFFile(path)
    text = load_gguf_text(file)
    changes, inexact = _choose_batch_invariant(job)
    # Layers that are batch-invariant read blocks as they are. Ranks cut blocks only where codes are asked for.
    keep_codes = bool(changes) and (job.weights is not None or (mesh.size == 1 and job.fit is None))
    try:
        gpt_config(gguf_config(file))
    except ValueError as error:
        load = functools.partial(load_module, path.parent, job, gguf_file=path.name)
        return _load_unmodified(lambda axis: (load(), None), job, mesh, text, error)
    with name_file_in_errors(path, "its weights"):
        config, params = gpt_from_gguf(file, dtype=DTYPES[job.dtype], keep_codes=keep_codes, **changes)
    num = sum(x.dtype == torch.uint8 for x in tree_leaves(params))
    coded = f"{num} weights in the file's own codes" if num else ""
    size = gpt.num_params(config)
    return LoadedModel(_make_decoder(config, mesh, job), params, text, inexact, size, coded, _fit_decoder(config, job))


def _load_unmodified(
    module: Callable[[str | None], HFModule],
    job: ModelSettings,
    mesh: Mesh,
    text: ModelText,
    problem: ValueError | None = None,
) -> LoadedModel:
    """Loads an unmodified model of transformers, where `models.gpt` differs, or with an adapter."""
    axis = _mesh_axis(mesh)
    batch_invariant = None if job.dtype == "float32" or axis else False
    try:
        model, values = module(axis)
        of_model = functools.partial(hf_decoder, model, params=values)
        made, params = of_model(
            batch_invariant=batch_invariant, tp=axis, quantization=job.weights, activations=job.activations
        )
    except ValueError as error:
        raise error from problem
    if made.cache.heads % mesh.size:
        raise ValueError(
            f"the ranks must divide the key heads of {job.model}, got {mesh.size} ranks and {made.cache.heads} heads."
            " Pass --mesh tp=N with such an N."
        ) from problem
    inexact = "" if made.batch_invariant else "some of the model's own layers are not"
    plain = None if job.fit is None else lambda: of_model()[0]
    return LoadedModel(made, params, text, inexact, _param_bytes(params), plain=plain)


def _load_run(path: pathlib.Path, job: ModelSettings, mesh: Mesh) -> LoadedModel:
    run = find_run(path)
    assert run is not None
    given = read_json_object(run / "model.json")
    if missing := [name for name in ("model", "per_head", "tokenizer") if name not in given]:
        raise ValueError(
            f"{run / 'model.json'} must have {missing}, got {sorted(given)}. Train again to write the file."
        )
    changes, inexact = _choose_batch_invariant(job)
    with name_file_in_errors(run / "model.json", "its model"):
        check_sizes(given["model"], run / "model.json")
        config = gpt_config(given["model"], per_head=given["per_head"], **changes)
    tokenizer = load_run_tokenizer(run, given)
    place = sharded(lambda params: params, mesh=mesh, specs=gpt.specs(config, tp=_mesh_axis(mesh)))
    shapes = eval_shape(functools.partial(gpt.init, config), key(0))
    like = place.init(tree_map(lambda x: x.to(DTYPES[job.dtype]), shapes))
    checkpoints = run / "checkpoints" if path == run else path
    try:
        params = restore(checkpoints, like, at="params", cast=job.dtype != "float32").tree
    except ValueError as error:
        if wrong := [line.strip().removeprefix("- ") for line in str(error).splitlines()[1:]]:
            num, listed = len(tree_leaves(shapes)), "; ".join(first_of(wrong, 3))
            title = f"{checkpoints} does not fit {run / 'model.json'}, in {len(wrong)} of {num} leaves"
            raise ValueError(f"{title}: {listed}") from error
        raise
    text = wrap_data_tokenizer(tokenizer)
    return LoadedModel(
        _make_decoder(config, mesh, job), params, text, inexact, _param_bytes(params), plain=_fit_decoder(config, job)
    )


def _choose_batch_invariant(job: ModelSettings) -> tuple[dict[str, Any], str]:
    """Returns the change of a `gpt.Config`, and the reason why there is no change."""
    if job.dtype != "float32":
        return {}, f"batch-invariant layers compute float32, and --dtype is {job.dtype}"
    if gpt.Config.chunks % job.ranks:
        return {}, f"{job.ranks} ranks do not divide the {gpt.Config.chunks} chunks of a sum"
    return {"batch_invariant": True}, ""


def _mesh_axis(mesh: Mesh) -> str | None:
    return AXIS if mesh.size > 1 else None


def _make_decoder(config: gpt.Config, mesh: Mesh, job: ModelSettings) -> Decoder:
    if job.weights is not None and not config.batch_invariant:
        raise ValueError(
            f"--weights {job.weights}: {_choose_batch_invariant(job)[1]}. Use other ranks, or leave out --weights"
        )
    return decoder(config, tp=_mesh_axis(mesh), quantization=job.weights, activations=job.activations)


def _fit_decoder(config: gpt.Config, job: ModelSettings) -> Callable[[], Decoder] | None:
    return None if job.fit is None else functools.partial(decoder, config)


def _param_bytes(params: PyTree) -> int:
    return sum(x.shape.numel() for x in tree_leaves(params))


# Rows of the text, and tokens of each.
_ROWS, _LENGTH = 16, 512


def _fit_codes(job: ModelSettings, params: PyTree, text: ModelText, plain: Decoder) -> tuple[PyTree, str]:
    """Returns the parameters on the grids of the codes, and a remark. Each rank fits all. Collective.

    Args:
        job: job with the text and the codes.
        params: parameters of the model. Parameters in codes already are not changed.
        text: tokenizer of the model.
        plain: decoder of the model, without codes, on a single rank.

    Raises:
        ValueError: the text has no tokens, or the model's layers are not known one by one.
        OSError: the text cannot be read.
    """
    assert job.fit is not None
    place, length = pathlib.Path(job.fit), min(_LENGTH, plain.context)
    tokens = text.encode(place.read_text(encoding="utf-8"))[: _ROWS * length]
    if not tokens:
        raise ValueError(f"--fit must be a text with tokens, similar to the prompts, got no tokens in {place}.")
    rows = [tokens[at : at + length] for at in range(0, len(tokens), length)]
    return fit_quantization(plain, params, job.weights, rows), f"fitted to {len(tokens):,} tokens of {place.name}"
