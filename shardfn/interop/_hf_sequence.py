"""Loss of a causal language model of transformers, and batches, where ranks have parts of a sequence.

transformers shifts labels in the model, and takes the mean there: on ranks with some tokens each, a rank's last token
would lose the target, and the mean would not be over all tokens. So labels are shifted before rows are cut, and a rank
returns a total and a weight.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn.collectives import bind_mesh
from shardfn.core import Mesh
from shardfn.nn import AttentionBackend, cross_entropy_sum, tiled_cross_entropy, whole_length
from shardfn.transforms import WeightedMean

_CUT = ("input_ids", "targets", "position_ids")
# Entries by which collators separate documents for kernels. Routed models ignore such entries.
_PACKED = ("segment_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")
# Models with logits that are only the product of the last hidden state and the output layer.
_PLAIN = ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3")


def causal_lm_batch(body: AttentionBackend, batch: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Returns this rank's tokens of whole rows, cut by `body`, with successors and positions.

    The step's spec for each entry is `P("dp", body.axes)`.

    Args:
        body: body of attention, such as `nn.Ring(axis, length)`.
        batch: whole rows, int64 [B, T] each: "input_ids", and optionally "labels", as transformers would shift them.
            -100 does not count. "position_ids" that start again mark packed documents.
        mesh: mesh of the step.

    Returns:
        {"input_ids", "targets", "position_ids"?, ...}, [B, this rank's tokens] each, and other entries of the batch
        unchanged.

    Raises:
        ValueError: rows have another length than the body's, or are packed by another entry without "position_ids".

    Example:
        >>> import shardfn as sf
        >>> rows = {"input_ids": torch.tensor([[5, 6, 7]])}
        >>> causal_lm_batch(sf.nn.Ring("sp", 3), rows, sf.make_mesh({"sp": 1}))["targets"].tolist()
        [[6, 7, -100]]
    """
    out = {name: x for name, x in batch.items() if name != "labels"}
    labels = batch.get("labels", batch["input_ids"])
    out["targets"] = F.pad(labels[:, 1:], (0, 1), value=-100)
    T = labels.shape[1]
    _check_packed(batch)
    with bind_mesh(mesh):
        length = whole_length(body, T)
        if length != T:
            raise ValueError(f"causal_lm_batch: length must be the number of tokens of a row, {T}, got {body}.")
        rows = body.rows(T)
    at = torch.cat([torch.arange(a, b, device=labels.device) for a, b in (*rows, (0, 0))])
    return out | {name: out[name][:, at] for name in _CUT if name in out}


def _check_packed(batch: Mapping[str, Tensor]) -> None:
    found = {name: tuple(batch[name].shape) for name in _PACKED if name in batch}
    if found and "position_ids" not in batch:
        raise ValueError(
            'causal_lm_batch: packed rows must have "position_ids" of the shape'
            f" {tuple(batch['input_ids'].shape)} that start again at 0 with each document, got {found} without them."
            " Otherwise a token would see all documents of the row."
        )


def causal_lm_loss(apply: Any, *, tile: int | None = None) -> Callable[..., WeightedMean]:
    """Returns the mean cross entropy of a causal language model, exact for any numbers of targets on ranks.

    Args:
        apply: function from `from_module(model)`, of a `...ForCausalLM`. With `layers=`, the loss is for
            `pipeline_module`, too.
        tile: number of tokens with logits in memory at a time. None is all tokens of a rank.

    Returns:
        `loss(params, batch[, key])` for batches from `causal_lm_batch`. A key turns dropout on. The batch then has an
        "index", int64 [B]: the samples' global numbers.

    Raises:
        ValueError: with `tile`, a model whose logits are more than a product with the output layer, or (when called) a
            key and no "index".

    Example:
        >>> import shardfn as sf
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=11, **sizes))
        >>> params, apply = sf.from_module(model, attention=sf.nn.Blockwise(4))
        >>> rows = {"input_ids": torch.arange(6)[None]}
        >>> total, count = causal_lm_loss(apply, tile=2)(params, causal_lm_batch(sf.nn.Dense(), rows, sf.make_mesh({})))
        >>> torch.allclose(total / count, model(**rows, labels=rows["input_ids"]).loss)
        True
    """
    model = apply.module
    kind, head = model.config.model_type, model.get_output_embeddings()
    if tile is not None and (kind not in _PLAIN or getattr(head, "bias", None) is not None):
        raise ValueError(
            f"causal_lm_loss(tile={tile}) needs logits that are only a product with the output layer, as of"
            f" {', '.join(_PLAIN)}, got a {type(model).__name__}. Leave tile out."
        )

    def whole_loss(targets_BT: Tensor, **given: Any) -> WeightedMean:
        return WeightedMean(*cross_entropy_sum(model(**given).logits, targets_BT))

    def tiled_loss(targets_BT: Tensor, **given: Any) -> WeightedMean:
        x_BTD = model.base_model(**given)[0]
        return WeightedMean(
            *tiled_cross_entropy(x_BTD, model.get_output_embeddings().weight, targets_BT, tile=tile or 1)
        )

    def loss(params: Any, batch: Mapping[str, Tensor], key: Tensor | None = None) -> WeightedMean:
        given = {name: x for name, x in batch.items() if name not in ("targets", "index")}
        forward = whole_loss if tile is None else tiled_loss
        if key is None:
            return apply.within(forward, params, batch["targets"], **given)
        if "index" not in batch:
            raise ValueError(
                'causal_lm_loss with a key: dropout needs the samples\' global numbers. Give the batch an "index",'
                " int64 [B], on one device torch.arange(B)."
            )
        return apply.keyed(key, batch["index"], forward)(params, batch["targets"], **given)

    return loss
