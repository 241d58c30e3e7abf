"""Weights fitted to codes: floats on the grids that make the error of layers' outputs small, over some text.

    codes of fitted[name] == fit_blocks(w, codes, H),  H = mean of x x^T over the layer's inputs x

Rounding keeps fitted values. So fitted weights are passed on as any weights are. Wherever they are rounded to the same
codes, in an engine, a step or a file, the codes are the fitted codes.

T tokens, K inputs, N outputs.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Int
from torch import Tensor

from shardfn.collectives import GlobalTensor
from shardfn.core import (
    Axes,
    Draw,
    PyTree,
    QuantizationPolicy,
    check_policy,
    find_quantization,
    first_of,
    raise_all,
    tree_entries,
    tree_flatten,
    tree_unflatten,
)
from shardfn.kernels import GROUP, Quantization, dequantize_blocks, fit_blocks, quantize_blocks

from ._cache import make_single_bodies
from ._decoder import Decoder
from ._low_rank import Linear, LowRank

# Bytes of moments that are kept at a time. The text is run once for each part of the layers.
TOGETHER = 512 << 20


@torch.no_grad()
def fit_quantization(
    decoder: Decoder,
    params: PyTree,
    quantization: QuantizationPolicy,
    rows: Sequence[Sequence[int]] | Int[Tensor, "b t"],
    *,
    compensate: bool = True,
) -> PyTree:
    """Returns parameters whose linear layers have values of codes with a small error of their outputs.

    Rounding to the same codes keeps these values: by `decoder(config, quantization=)` and `hf_decoder(model,
    quantization=)`, and where groups are along a leaf's last dim also by `Sharding(quantization=)` and
    `LoRA.of(quantization=)`. Parameters have to be float32 until then. Other leaves, tables of embeddings and the head
    are returned as given.

    Every rank computes all parameters, and has the same result.

    Args:
        decoder: model, exact, without codes and without `tp`.
        params: parameters. `GlobalTensor`s are gathered, which is collective.
        quantization: policy, as for the decoder that will serve the parameters.
        rows: token ids of some text, such as 16 rows of 512, like the text that the model will see.
        compensate: whether a weight also makes up for the errors of earlier weights (GPTQ). Otherwise each input's size
            weighs the error of its weights.

    Raises:
        ValueError: the decoder's layers are not known one by one, or the policy or a row does not fit the decoder.

    Example:
        >>> import shardfn as sf
        >>> from shardfn.inference import Engine, decoder
        >>> from shardfn.models import gpt
        >>> sizes = {"num_layers": 1, "d_model": 32, "num_heads": 1, "max_len": 16}
        >>> config = gpt.Config(vocab_size=64, **sizes, batch_invariant=True)
        >>> rows = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
        >>> fitted = fit_quantization(decoder(config), gpt.init(config, sf.key(0)), "int4", rows)
        >>> light = Engine(decoder(config, quantization="int4"), fitted)  # these very codes
    """
    given = [list(map(int, row)) for row in rows]
    flat, treedef = tree_flatten(params)
    paths = [".".join(map(str, entries)) for entries in tree_entries(params)]
    _check_fit(decoder, quantization, given, paths)
    leaves = [_gather_whole(x) for x in flat]
    sites = list(_find_sites(paths, leaves, decoder.linear, quantization))
    served = decoder.pack(tree_unflatten(treedef, leaves))
    fitted = {i: leaves[i].float().clone() for i in {site.leaf for site in sites}}
    for part in _split_sites(sites):
        moments = Moments({site.name: site.sizes.inputs for site in part}, full=compensate)
        for tokens in given:
            _run_row(decoder, served, tokens, moments)
        for site in part:
            leaf = fitted[site.leaf]
            _fit_weight(site, leaf if site.layer is None else leaf[site.layer], moments.mean(site.name))
    return tree_unflatten(treedef, [fitted.get(i, x) for i, x in enumerate(leaves)])


class Moments:
    """Mean of x x^T of the inputs of some layers. Moments take the place of adapters, and add nothing.

    Args:
        inputs: number K by layer.
        full: whether moments are [K, K]. Otherwise only the diagonal.
    """

    def __init__(self, inputs: Mapping[str, int], *, full: bool) -> None:
        self.sites, self._full = inputs, full
        self._sums: dict[str, Tensor] = {}
        self._counts = dict.fromkeys(inputs, 0)

    def added(
        self, name: str, x: Tensor, y: Tensor, *, axis: Axes = None, joins: bool = False, cut: bool = False
    ) -> Tensor:
        """Returns the result of a layer, and counts its inputs."""
        del axis, joins, cut
        if name in self.sites:
            x_TK = x.reshape(-1, x.shape[-1]).float()
            own = x_TK.T @ x_TK if self._full else x_TK.square().sum(0)
            self._sums[name] = own if name not in self._sums else self._sums[name].add_(own)
            self._counts[name] += len(x_TK)
        return y

    def mean(self, name: str) -> Tensor | None:
        """Returns the mean of a layer, or None for a layer that has seen no input."""
        return self._sums.pop(name) / self._counts[name] if name in self._sums else None


class _WeightSite(NamedTuple):
    """A weight: a leaf, or one layer of a stacked leaf."""

    name: str
    leaf: int
    layer: int | None
    quantization: Quantization
    sizes: Linear


def _find_sites(
    paths: Sequence[str], leaves: Sequence[Tensor], linear: Mapping[str, Linear], policy: QuantizationPolicy
) -> Iterator[_WeightSite]:
    """Yields the weights that the policy quantizes and that are not quantized yet, in the order of layers.

    Raises:
        ValueError: lists the layers whose weights are not leaves.
    """
    places: dict[str, tuple[int, int | None]] = {}
    for i, (path, x) in enumerate(zip(paths, leaves, strict=True)):
        before, _, last = path.rpartition(".")
        places |= (
            {path: (i, None)} if path in linear else {f"{before}.{k}.{last}": (i, k) for k in range(_split_layers(x))}
        )
    raise_all(
        ValueError,
        "fit_quantization: these layers have no separate leaf in params, such as layers of stacked blocks:",
        first_of([name for name in linear if name not in places], 20),
    )
    for name, sizes in linear.items():
        quantization, (i, layer) = find_quantization(policy, name), places[name]
        if quantization is not None and leaves[i].is_floating_point():
            yield _WeightSite(name, i, layer, quantization, sizes)


def _split_layers(x: Tensor) -> int:
    return len(x) if x.ndim > 1 else 0


def _split_sites(sites: Sequence[_WeightSite]) -> Iterator[list[_WeightSite]]:
    """Yields the sites whose moments are kept together."""
    part, size = list[_WeightSite](), 0
    for site in sites:
        nbytes = 4 * site.sizes.inputs**2
        if part and size + nbytes > TOGETHER:
            yield part
            part, size = [], 0
        part.append(site)
        size += nbytes
    if part:
        yield part


def _run_row(decoder: Decoder, served: PyTree, tokens: list[int], moments: Moments) -> None:
    tokens_T = torch.tensor(tokens)
    at_T, bodies = torch.arange(len(tokens)), make_single_bodies(decoder.cache, len(tokens))
    decoder.outputs(served, tokens_T, at_T, at_T[-1:], bodies, cast(LowRank, moments))


def _fit_weight(site: _WeightSite, weight: Tensor, moments: Tensor | None) -> None:
    """Writes the fitted values of a weight in place.

    The inputs behind the last whole group are rounded, with zeros to the end of their group, as served.
    """
    k, transposed = site.sizes.inputs, site.sizes.transposed
    given_NK, whole = weight.T if transposed else weight.reshape(-1, k), k // GROUP * GROUP
    if moments is not None:
        moments = moments[(slice(whole),) * moments.ndim]
    values = list[Tensor]()
    if whole:
        values.append(dequantize_blocks(fit_blocks(given_NK[:, :whole], site.quantization, moments), whole))
    if rest := k - whole:
        padded = torch.nn.functional.pad(given_NK[:, whole:], (0, GROUP - rest))
        values.append(dequantize_blocks(quantize_blocks(padded, site.quantization), rest))
    values_NK = torch.cat(values, 1)
    weight.copy_(values_NK.T if transposed else values_NK.view(weight.shape))


def _gather_whole(x: Any) -> Tensor:
    if isinstance(x, GlobalTensor):
        return x.full_tensor()
    return x.full() if isinstance(x, Draw) else x


def _check_fit(
    decoder: Decoder, quantization: QuantizationPolicy, rows: Sequence[Sequence[int]], paths: Sequence[str]
) -> None:
    if not decoder.linear:
        raise ValueError(
            "fit_quantization: this decoder does not show its linear layers. Use Config(batch_invariant=True), or"
            " hf_decoder(model, batch_invariant=True)."
        )
    if decoder.cache.axis is not None:
        raise ValueError(
            f"fit_quantization: this decoder is cut over {decoder.cache.axis!r}. Pass one without tp=, and serve the"
            " result with any."
        )
    if quantization is None:
        raise ValueError(
            "fit_quantization: quantization=None rounds nothing. Pass 'int8', 'int4' or codes by regular expressions."
        )
    check_policy(quantization, [*decoder.linear, *paths], "fit_quantization")
    if not rows:
        raise ValueError(
            "fit_quantization: there are no rows of tokens. Pass some text, such as 16 rows of 512 tokens."
        )
    for i, row in enumerate(rows):
        if not 1 <= len(row) <= decoder.context or not all(0 <= token < decoder.vocab for token in row):
            raise ValueError(
                f"fit_quantization: row {i} must have 1 to {decoder.context} tokens from 0 to {decoder.vocab - 1}, got"
                f" {len(row)} tokens from {min(row, default=0)} to {max(row, default=0)}."
            )
