"""Perplexity of a model of transformers in codes: a coder and a policy, on one text that no coder has seen.

The model of a GGUF file of 4 bits has weights that lie on grids of 4 bits. So it is first made into one that computes
the same function from other numbers: each feature behind a norm, and each row of `up_proj` and `v_proj`, is multiplied
by a random number from exp(-1/4) to exp(1/4), by which the columns behind it are divided. The head is untied from the
embeddings. These weights lie on no grid, and a group has about the spread that it had.

    rounded      kernels.code_blocks
    fitted       kernels.fit_blocks(w)
    weighed      kernels.fit_blocks(w, moments [k])
    compensated  kernels.fit_blocks(w, moments [k, k])
"""

import functools
import math
import pathlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from _report import table
from torch import Tensor

from shardfn.core import codes_of
from shardfn.kernels import BLOCK_BYTES, GROUP, Codes, code_blocks, decode_blocks, fit_blocks

HEAD = {"lm_head|embed": "int8"}
ENDS = {"layers.0.|layers.29.": "int8"}
Policy = Mapping[str, Codes]


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
def perplexities(path: str, learnt: Sequence[str], texts: Sequence[str], tokens: int, length: int) -> list[str]:
    """The table: the model of a GGUF file, on the last tokens of some texts; moments are those of others."""
    import transformers

    file = pathlib.Path(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    rows, calibration = (
        torch.tensor(tokenizer("\n".join(pathlib.Path(x).read_text() for x in given))["input_ids"][:tokens]).view(
            -1, length
        )
        for given in (texts, learnt)
    )
    before = _perplexity(model, rows)
    off_grid(model)
    weights = {name: m.weight.clone() for name, m in _layers(model)}
    plain = _perplexity(model, rows)
    print(f"as in the file {before:.4f}, off its grids {plain:.4f}", flush=True)
    moments = _moments(model, calibration)
    lines = [("float32", "", "32.0", f"{plain:.4f}", "")]
    for case in CASES:
        begin, bits, numel = time.process_time(), 0.0, 0
        for name, layer in _layers(model):
            codes = codes_of(case.policy, f"{name}.weight")
            assert codes is not None
            layer.weight.copy_(_coded(case.coder, weights[name], codes, moments.get(name)))
            bits += weights[name].numel() * 8 * BLOCK_BYTES[codes] / GROUP
            numel += weights[name].numel()
        spent = time.process_time() - begin
        found = _perplexity(model, rows)
        lines.append(
            (case.words, case.coder, f"{bits / numel:.2f}", f"{found:.4f}", f"{(found / plain - 1) * 100:+.2f}%")
        )
        print(lines[-1], f"coded in {spent:.0f} s", flush=True)
    head = ("weights", "coder", "bits", "perplexity", "change")
    said = f"{file.name} off its grids, {rows.numel()} tokens of {', '.join(texts)}, in rows of {length}"
    return [f"{said}; moments are those of as many tokens of {', '.join(learnt)}", table(head, lines)]


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
    for name, module in model.named_modules():
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
    for row in rows:
        model.model(row[None])
    for hook in hooks:
        hook.remove()
    return sums


def _coded(coder: str, w: Tensor, codes: Codes, moments: Tensor | None) -> Tensor:
    if coder == "rounded" or w.shape[0] > 1 << 15:  # a vocabulary
        return decode_blocks(code_blocks(w, codes), w.shape[1])
    given = {"fitted": None, "weighed": None if moments is None else moments.diagonal(), "compensated": moments}[coder]
    return decode_blocks(fit_blocks(w, codes, given), w.shape[1])


def _perplexity(model: Any, rows: Tensor) -> float:
    return math.exp(statistics.fmean(model(row[None], labels=row[None]).loss.item() for row in rows))
