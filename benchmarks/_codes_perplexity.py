"""Perplexity of a model in codes: a coder and a policy, on one text that neither the model nor a coder has seen.

A run of `scripts/train` has float weights, and rows that it held out. The model of a GGUF file of 4 bits has weights
that lie on grids of 4 bits. So it is first made into one that computes the same function from other numbers: each
feature behind a norm, and each row of `up_proj` and `v_proj`, is multiplied by a random number from exp(-1/4) to
exp(1/4), by which the columns behind it are divided. The head is untied from the embeddings. These weights lie on no
grid, and a group has about the spread that it had.

    rounded      kernels.quantize_blocks
    fitted       kernels.fit_blocks(w)
    weighed      kernels.fit_blocks(w, moments [k])
    compensated  kernels.fit_blocks(w, moments [k, k])
"""

import functools
import json
import math
import pathlib
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from _report import table
from torch import Tensor

import shardfn as sf
from shardfn.core import find_quantization
from shardfn.kernels import BLOCK_BYTES, GROUP, Quantization, dequantize_blocks, fit_blocks, quantize_blocks
from shardfn.models import gpt

HEAD = {"lm_head|embed": "int8"}
ENDS = {r"layers\.0\.|layers\.LAST\.": "int8"}
Policy = Mapping[str, Quantization]


class Case(NamedTuple):
    """A row of the table."""

    coder: str
    policy: Any
    words: str


CASES = (
    Case("rounded", {"": "int4"}, "int4"),
    Case("rounded", HEAD | {"": "int4"}, "int4; embeddings and head int8"),
    Case("compensated", HEAD | {"": "int4"}, "int4; embeddings and head int8"),
    Case("fitted", HEAD | {"": "int4"}, "int4; embeddings and head int8"),
    Case("weighed", HEAD | {"": "int4"}, "int4; embeddings and head int8"),
    Case("compensated", HEAD | ENDS | {"": "int4"}, "int4; embeddings, head, first and last layer int8"),
    Case("compensated", HEAD | {"down_proj|v_proj|o_proj": "int8", "": "int4"}, "int4; also down, v and o int8"),
    Case("rounded", {"": "int8"}, "int8"),
)


@torch.no_grad()
def of_gguf(path: str, learnt: Sequence[str], texts: Sequence[str], tokens: int, length: int) -> list[str]:
    """The table of a GGUF file's model off its grids, on the first tokens of some texts; moments are of others."""
    import transformers

    file = pathlib.Path(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )

    def rows(given: Sequence[str]) -> Tensor:
        text = "\n".join(pathlib.Path(x).read_text() for x in given)
        return torch.tensor(tokenizer(text)["input_ids"][:tokens]).view(-1, length)

    off_grid(model)
    said = (
        f"{file.name} off its grids, {tokens} tokens of {', '.join(texts)}, in rows of {length}; moments are those of"
    )
    return [f"{said} as many tokens of {', '.join(learnt)}", _rows_of_cases(model, rows(texts), rows(learnt))]


@torch.no_grad()
def of_run(directory: str, rows: int) -> list[str]:
    """The table of a run of examples/train_gpt.py, on rows that it held out; moments are those of rows it has seen."""
    import transformers

    run, out = pathlib.Path(directory), tempfile.mkdtemp()
    config = sf.interop.gpt_config(json.loads((run / "model.json").read_text())["model"])
    like = sf.core.tree_map(
        lambda x: torch.empty(x.shape), sf.eval_shape(functools.partial(gpt.init, config), sf.key(0))
    )
    restored = sf.checkpoint.restore(run / "checkpoints", like, at="params", partial=True)
    sf.interop.gpt_to_hf(out, config, restored.tree)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    data = restored.user["data"]
    source = sf.data.TokenFile.open(run / "tokens.bin")
    training, held_out = sf.data.Batches(source, rows, data["length"], data["seed"]).split(0.02)
    seen, unseen = (x(0)["tokens"][:, :-1] for x in (training, held_out))
    said = f"{gpt.num_params(config):,} parameters after {restored.step} steps, {unseen.numel():,} tokens in rows"
    return [f"{said} of {unseen.shape[1]} that it held out; moments are those of as many that it has seen",
            _rows_of_cases(model, unseen, seen)]  # fmt: skip


def _rows_of_cases(model: Any, rows: Tensor, calibration: Tensor) -> str:
    weights = {name: m.weight.clone() for name, m in _layers(model)}
    plain, last = _perplexity(model, rows), model.config.num_hidden_layers - 1
    moments = _moments(model, calibration)
    lines = [("float32", "", "32.00", f"{plain:.4f}", "")]
    for case in CASES:
        bits, numel = 0.0, 0
        policy = {pattern.replace("LAST", str(last)): codes for pattern, codes in case.policy.items()}
        for name, layer in _layers(model):
            codes = find_quantization(policy, f"{name}.weight")
            assert codes is not None
            layer.weight.copy_(_coded(case.coder, weights[name], codes, moments.get(name)))
            bits += weights[name].numel() * 8 * BLOCK_BYTES[codes] / GROUP
            numel += weights[name].numel()
        found = _perplexity(model, rows)
        change = f"{(found / plain - 1) * 100:+.2f}%"
        lines.append((case.words, case.coder, f"{bits / numel:.2f}", f"{found:.4f}", change))
        print(lines[-1], flush=True)
    return table(("weights", "coder", "bits", "perplexity", "change"), lines)


def off_grid(model: Any, seed: int = 0) -> None:
    """Makes a Llama compute its function from weights that lie on no grid."""
    generator, core, config = torch.Generator().manual_seed(seed), model.model, model.config
    each = config.num_attention_heads // config.num_key_value_heads
    for layer in core.layers:
        attention, mlp = layer.self_attn, layer.mlp
        _scale(layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj), generator)
        _scale(layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj), generator)
        _scale(mlp.up_proj, (mlp.down_proj,), generator)
        _scale(attention.v_proj, (attention.o_proj,), generator, heads=config.num_key_value_heads, each=each)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    _scale(core.norm, (model.lm_head,), generator)


def _scale(first: Any, behind: Sequence[Any], generator: torch.Generator, heads: int = 1, each: int = 1) -> None:
    """Multiplies the outputs of a norm or of a layer, and divides the columns behind it; `each` read a head."""
    num = first.weight.shape[0]
    s = ((torch.rand(num, generator=generator) - 0.5) / 2).exp()
    first.weight.mul_(s.view(-1, *[1] * (first.weight.ndim - 1)))
    for layer in behind:
        layer.weight.div_(s.view(heads, 1, -1).expand(-1, each, -1).flatten())


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Linear layers and tables of embeddings; a head that is tied to its table is the table."""
    seen = set[int]()
    for name, module in model.named_modules():
        if id(weight := getattr(module, "weight", None)) in seen:
            continue
        seen.add(id(weight))
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            yield name, module


def _moments(model: Any, rows: Tensor) -> dict[str, Tensor]:
    """The mean of x x^T over the inputs of each linear layer, without the head, whose codes are of 8 bits."""
    sums: dict[str, Tensor] = {}

    def note(name: str, args: Any) -> None:
        x = args[0].flatten(0, -2)
        sums[name] = sums.get(name, 0) + x.T @ x / rows.numel()

    hooks = [
        m.register_forward_pre_hook(functools.partial(lambda name, _, args: note(name, args), name))
        for name, m in _layers(model)
        if isinstance(m, torch.nn.Linear) and name != "lm_head"
    ]
    for x in rows.split(max(1, 512 // rows.shape[1])):
        model.model(x)
    for hook in hooks:
        hook.remove()
    return sums


def _coded(coder: str, w: Tensor, codes: Quantization, moments: Tensor | None) -> Tensor:
    if coder == "rounded" or (coder != "fitted" and moments is None):
        return dequantize_blocks(quantize_blocks(w, codes), w.shape[1])
    given = moments.diagonal() if coder == "weighed" and moments is not None else moments
    given = None if coder == "fitted" else given
    return dequantize_blocks(fit_blocks(w, codes, given), w.shape[1])


def _perplexity(model: Any, rows: Tensor) -> float:
    return math.exp(statistics.fmean(model(x, labels=x).loss.item() for x in rows.split(max(1, 512 // rows.shape[1]))))
