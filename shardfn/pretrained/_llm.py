"""A model in a single line: text in, text out, by an engine of a directory's model."""

import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

from shardfn.core import Mesh, explains_keywords, make_mesh
from shardfn.inference import Beam, BeamSearch, Completion, ImagePrompt, ImageReader, Sampling, limits_of
from shardfn.kernels import Activations, Quantization

from ._images import load_image_encoder, load_speech_reader
from ._load import AXIS, load_model, make_engine
from ._settings import ModelSettings, Problem, detect_kind, read_sampling

Prompt = str | Sequence[int] | Tensor
Message = Mapping[str, Any]
_MEANT = {
    "tensor_parallel_size": "mesh=sf.make_mesh({{'tp': {value!r}}}), in one process a rank",
    "max_model_len": "context={value!r}",
    "max_num_seqs": "running={value!r}",
    "kv_cache_dtype": "cache_dtype={value!r}",
    "gpu_memory_utilization": "cache_gib=, GiB of the KV cache",
    "enable_lora": "adapters=, directories by name",
    "tokenizer": "nothing: the tokenizer is the directory's",
    "trust_remote_code": "nothing: code of a directory never runs",
    "seed": "Sampling(seed={value!r}): each request has its own",
}


class LLM:
    """A language model of a directory, with its tokenizer and its defaults. All ranks of a mesh make the same calls.

    Args:
        model: directory of Hugging Face, a GGUF file, or a run of examples/train_gpt.py.
        mesh: mesh with the axis "tp". None is a single device.
        dtype: "float32", which is batch-invariant, or "bfloat16".
        quantization: "int8" or "int4" for the weights of linear layers.
        activations: "int8" rounds the inputs of layers in codes, see `inference.decoder`.
        context: most tokens of a sequence. Default: the model's.
        cache_gib: most GiB of the KV cache, on all ranks together.
        drafter: "none", "ngram", "suffix" or "jacobi", for speculative decoding.
        speculator: directory of a speculator of the model, in place of a drafter.
        branches: branches of the speculator's trees. 1 proposes chains.
        adapters: directories of peft, by the names that calls give.
        image_root: directory whose images `file:` URLs of chats may name, for a model of images and text. None permits
            only `data:` URLs.
        **sizes: other fields of `inference.Limits`.

    Attributes:
        engine: engine, for requests by hand.
        text: tokenizer.
        classifier: classification head of a `...ForSequenceClassification`, or None.
        sampling: sampling of calls without one: the values of the directory's `generation_config.json`.

    Raises:
        ValueError: the model cannot be served, or a value is out of range.
        OSError: a file is missing, or damaged.
        ImportError: a package is missing. The message has the installation.

    Example:
        >>> LLM("no/such/model")
        Traceback (most recent call last):
        ValueError: LLM: MODEL no/such/model does not exist; a model of Hugging Face is fetched first...
    """

    @explains_keywords(**_MEANT)
    def __init__(
        self,
        model: str,
        *,
        mesh: Mesh | None = None,
        dtype: str = "float32",
        quantization: Quantization | None = None,
        activations: Activations | None = None,
        context: int | None = None,
        cache_gib: float = 1.0,
        drafter: str = "none",
        speculator: str | None = None,
        branches: int = 1,
        adapters: Mapping[str, str] | None = None,
        image_root: str | None = None,
        **sizes: Any,
    ) -> None:
        path = pathlib.Path(model)
        kind = detect_kind(path)
        if isinstance(kind, Problem):
            raise ValueError(f"LLM: {kind}")
        recommended = read_sampling(path) if kind == "files" else {}
        job = ModelSettings(
            **{"model": str(model), "kind": kind, "ranks": 1 if mesh is None else mesh.axis_size(AXIS), "dtype": dtype},
            **{
                "weights": quantization,
                "activations": activations,
                "cache_gib": cache_gib,
                "drafter": drafter,
                "speculator": speculator,
                "branches": branches,
                "recommended": recommended,
                "classifies": True,
            },
        )
        mesh = make_mesh({}, alone=True) if mesh is None else mesh
        served = load_model(job, mesh)
        sizes = {"context": context, "cache_bytes": int(cache_gib * 2**30), "drafts": job.drafts, **sizes}
        limits = limits_of(served.decoder, **sizes)
        self.engine, _ = make_engine(job, served, limits, mesh, adapters or {})
        self.classifier = served.classifier
        encoder = load_image_encoder(path, served.text.tokenizer) if kind == "files" else None
        speech = load_speech_reader(path, served.text.token) if kind == "files" else None
        self.text = served.text._replace(images=encoder, speech=speech)
        self._reader = None if encoder is None else ImageReader(encoder, image_root)
        if image_root is not None and encoder is None:
            raise ValueError(f"LLM: image_root needs a model of images and text, got {model}. Leave it out.")
        self.sampling = Sampling(**recommended)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Any]:
        """Completes prompts. Tokens that end a text by the model's files end each completion, too.

        Args:
            prompts: text or token ids of a prompt, or its embeddings, float [P, D], or a list of prompts.
            sampling: a `Sampling` for all prompts, or a list with a `Sampling` for each. Default: `sampling`.
            adapter: name of an adapter, or a list with a name for each prompt.

        Returns:
            For each prompt a `Completion` with its text, or for a request of n > 1 choices a list of n.

        Raises:
            TypeError: as `Engine.generate`.
            ValueError: as `Engine.generate`.
        """
        self._check_generates()
        return self.engine.generate(self._encode_all(prompts), self._with_ends(sampling), adapter=adapter)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Any]:
        """Answers conversations, by the tokenizer's chat template.

        Args:
            messages: messages with "role" and "content" of one conversation, or of each of several. For a model of
                images and text a content may be a list of parts, {"type": "text", "text": ...} and {"type":
                "image_url", "image_url": {"url": ...}}. A URL is `data:image/png;base64,...`, or a file below
                `image_root`.
            sampling: see `generate`.
            adapter: see `generate`.

        Returns:
            See `generate`.

        Raises:
            ValueError: the tokenizer has no chat template, or the template refuses the messages, or an image is wrong.
        """
        self._check_generates()
        if self.text.chat is None:
            raise ValueError("chat: the tokenizer has no chat template. Use generate.")
        several: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        each = [self._make_chat_prompt(one) for one in several]
        pictures: dict[str, Any] = {}
        if self._reader is not None:
            pictures = {"image_features": [x.features for x in each], "image_grids": [x.grids for x in each]}
        return self.engine.generate([x.ids for x in each], self._with_ends(sampling), adapter=adapter, **pictures)

    def transcribe(
        self, sounds: bytes | Sequence[bytes], sampling: Sampling | None = None, *, language: str | None = None
    ) -> list[Completion]:
        """Returns the transcript of each sound, for a Whisper.

        Args:
            sounds: content of a WAV file of at most 30 s, or a list of them. See `data.read_wav`.
            sampling: rule of drawing tokens. Default: the likeliest tokens, up to the longest transcript.
            language: code of the language, such as "en", which is the default.

        Raises:
            ValueError: the model reads no sounds, or a sound is no WAV file, or the language is unknown.
        """
        speech = self.text.speech
        if speech is None:
            raise ValueError("transcribe: the model reads no sounds. Load a Whisper.")
        prompt = speech.begin(language)
        how = sampling or Sampling(max_tokens=self.engine.limits.context - len(prompt), temperature=0.0, min_tokens=1)
        how = replace(self._with_ends(how), bad_words=(*how.bad_words, *((x,) for x in speech.banned)))
        features = [speech.read(x)[0].values for x in ([sounds] if isinstance(sounds, bytes) else sounds)]
        return self.engine.generate([prompt] * len(features), how, sources=features)

    def _make_chat_prompt(self, messages: Sequence[Message]) -> ImagePrompt:
        assert self.text.chat is not None
        if self._reader is None:
            return ImagePrompt(self.text.plain(self.text.chat([dict(x) for x in messages])), None, ())
        shown, images = self._reader.read_messages(messages, self.text.template)
        return self._reader.expand(self.text.chat(shown), images, self.text.plain)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], rule: BeamSearch | None = None, *, adapter: str | None = None
    ) -> list[list[Beam]]:
        """Returns the best continuations of prompts by a search in beams. See `Engine.beam_search`.

        Args:
            prompts: see `generate`.
            rule: rule of the search. Tokens that end a text by the model's files end each continuation, too.
            adapter: name of an adapter, or None.

        Raises:
            ValueError: as `Engine.beam_search`.
        """
        self._check_generates()
        rule = BeamSearch() if rule is None else rule
        ends = dict.fromkeys([*rule.stop_tokens, *sorted(self.text.ends)])
        return self.engine.beam_search(
            self._encode_all(prompts), replace(rule, stop_tokens=tuple(ends)), adapter=adapter
        )

    def embed(
        self, prompts: Prompt | Sequence[Prompt], pooling: str = "last", *, normalize: bool = True
    ) -> Float32[Tensor, "n d"]:
        """Returns an embedding of each prompt. See `Engine.embed`.

        Args:
            prompts: see `generate`.
            pooling: "last" or "mean".
            normalize: whether embeddings have the length 1.
        """
        return self.engine.embed(self._encode_all(prompts), pooling, normalize=normalize)

    def classify(self, prompts: Prompt | Sequence[Prompt]) -> Float32[Tensor, "n c"]:
        """Returns the probabilities of the model's classes, or a reward model's rewards, for each prompt.

        Equals transformers' model of sequence classification, with the bits of each prompt alone.

        Args:
            prompts: see `generate`.

        Raises:
            ValueError: the model has no classification head.
        """
        if self.classifier is None:
            raise ValueError("classify: the model has no classification head. Load a ...ForSequenceClassification.")
        logits = map(self.classifier.compute_logits, self.engine.embed(self._encode_all(prompts)))
        return torch.tensor([self.classifier.classes.activate(x.tolist()) for x in logits])

    def score(
        self, text: Prompt | Sequence[Prompt], pairs: Prompt | Sequence[Prompt], pooling: str = "last"
    ) -> Float32[Tensor, " n"]:
        """Returns the cosines of the embeddings of pairs of texts.

        Args:
            text: a text for all pairs, or a list with a text for each.
            pairs: text or texts that are compared with `text`.
            pooling: see `embed`.

        Raises:
            ValueError: there are several texts, and not as many pairs.
        """
        left, right = self._encode_all(text), self._encode_all(pairs)
        if len(left) not in (1, len(right)):
            raise ValueError(f"score: {len(left)} texts and {len(right)} pairs. Pass one text, or one for each pair.")
        rows = self.engine.embed(left + right, pooling, normalize=True)
        return (rows[: len(left)].double() * rows[len(left) :].double()).sum(-1).to(torch.float32)

    def _check_generates(self) -> None:
        if self.classifier is not None:
            raise ValueError("the model has classes in place of tokens. Call classify.")

    def _encode_all(self, prompts: Any) -> list[Any]:
        if isinstance(prompts, str | Tensor) or (len(prompts) and isinstance(prompts[0], int)):
            prompts = [prompts]
        return [self.text.encode(x) if isinstance(x, str) else x if isinstance(x, Tensor) else list(x) for x in prompts]

    def _with_ends(self, sampling: Sampling | Sequence[Sampling] | None) -> Any:
        """Returns samplings that also end with the tokens of the model's files."""
        if sampling is None or isinstance(sampling, Sampling):
            one = self.sampling if sampling is None else sampling
            ends = dict.fromkeys([*one.stop_tokens, *sorted(self.text.ends)])
            return replace(one, stop_tokens=tuple(ends))
        return [self._with_ends(one) for one in sampling]
