"""Covers a zoo of unmodified Hugging Face models: each mode equals one device, or names a remedy that works."""

import contextlib
import functools
import gc
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfn as sf
from shardfn.core import tree_leaves
from shardfn.testing import RTOL, Run, assert_same, distributed, on_mesh, one_device

transformers = pytest.importorskip("transformers")

from architectures import DAILY, DROPOUT, ZOO, Entry  # noqa: E402  # beside this file; needs transformers
from tiny_configs import tiny  # noqa: E402
from tiny_inputs import ROWS, inputs  # noqa: E402

STEPS, WORLD = 2, 2
MODES = ("stage 3", "stage 1", "jit", "bf16", "checkpointing", "dropout")
TX = sf.optim.sgd(0.1)
# A pattern of a refusal -> the remedy that it names, and that a test then applies.
REMEDIES = {
    r"get_submodule\('[^']+'\)\.eval\(\)|batch_norm in training": "constant statistics",
    r"apply\.keyed\(key, index_B\)": "key",
    r"name that parameter in the policy": "exceptions",
    r"or leave out jit, as eager steps run any Python": "no jit",
    r"turn off the random parts \(module\.eval\(\)": "eval",
}
graph = functools.partial(sf.jit, backend="graph")


@pytest.mark.day("BertLMHeadModel-checkpointing")
@pytest.mark.parametrize("name, mode", DAILY)
@distributed(world=WORLD, timeout=150)
def test_a_few_equal_one_device(name: str, mode: str) -> None:
    _compare(name, [mode])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ZOO)
@distributed(world=WORLD, timeout=600)
def test_architectures_equal_one_device(name: str) -> None:
    _compare(name, MODES if name in DROPOUT else MODES[:-1])


def _compare(name: str, modes: Sequence[str]) -> None:
    """Each mode on models of its own; the errors of all of them are raised together."""
    mesh, wrong = sf.make_mesh({"dp": WORLD}), {}
    wants: dict[Any, Run] = {}  # the results of one device, which most modes share
    for mode in modes:
        said = ZOO[name].impossible.get(mode)
        try:
            with pytest.raises(Exception, match=said) if said else contextlib.nullcontext():
                run_mode(name, mode, mesh, wants)
        except Exception as error:
            wrong[mode] = error
    gc.collect()  # models are cyclic, and a worker sees a hundred of them
    lines = [f"{mode}: {type(e).__name__}: {e}" for mode, e in wrong.items()]
    assert not lines, f"{name}:\n" + "\n".join(lines)


def run_mode(name: str, mode: str, mesh: sf.Mesh, wants: dict[Any, Run]) -> None:
    """Runs one mode; its refusals must be those of the table, and the remedies that they name must work.

    Args:
        name: of the architecture.
        mode: one of `MODES`.
        mesh: the mesh.
        wants: the results of one device, which several modes share.
    """
    remedies: tuple[str, ...] = ()
    while True:
        try:
            _attempt(name, mode, mesh, wants, remedies)
            break
        except (ValueError, TypeError, RuntimeError) as error:
            remedy = next((r for said, r in REMEDIES.items() if re.search(said, str(error))), None)
            if remedy is None or remedy in remedies:
                raise
        remedies += (remedy,)
    entry = ZOO[name]
    expected = (*entry.refused, *entry.refused_in.get(mode, ()), *(["key"] if mode == "dropout" else []))
    assert remedies == expected, f"refused until {remedies}, where the table has {expected}"


def _attempt(name: str, mode: str, mesh: sf.Mesh, wants: dict[Any, Run], remedies: tuple[str, ...]) -> None:
    entry, narrow, dropout = ZOO[name], mode == "bf16", 0.3 if mode == "dropout" else 0.0
    model = _build(name, narrow, remedies, dropout)
    if mode in ("checkpointing", "dropout") and model.supports_gradient_checkpointing and model.training:
        model.activation_checkpointing_enable()
    params, apply = sf.from_module(model)
    options: dict[str, Any] = {"key": sf.key(3)} if "key" in remedies else {}
    policy = _policy(remedies) if narrow else None
    loss = _loss(apply, policy, keyed=bool(options))
    batches = [_batch(model, entry, seed, numbered=bool(options)) for seed in range(STEPS)]
    zero = sf.Zero(stage=1 if mode == "stage 1" else 3, persist_elements=0, travel=sf.Travel(bucket_bytes=1000))
    got = on_mesh(
        graph(loss) if mode == "jit" and "no jit" not in remedies else loss,
        TX,
        params,
        batches,
        mesh=mesh,
        zero=zero,
        **options,
    )
    which = narrow, dropout, remedies
    if which not in wants:
        wants[which] = _reference(name, _build(name, narrow, remedies, dropout), policy, batches, options)
    assert_same(got, wants[which])


def _build(name: str, narrow: bool, remedies: tuple[str, ...], dropout: float = 0.0) -> Any:
    """The model, tiny, in training mode except where a remedy sets another."""
    entry, kind = ZOO[name], getattr(transformers, name)
    config = tiny(kind.config_class, entry.config)
    torch.manual_seed(0)
    model = kind(config).to(torch.float32 if narrow else entry.dtype).train("eval" not in remedies)
    for m in model.modules():
        if isinstance(m, nn.modules.dropout._DropoutNd):
            m.p = dropout
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and "constant statistics" in remedies:
            m.eval()
    # A leaf with gradient 0, such as a key's bias, must be large against its gradient's rounding.
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


def _batch(model: nn.Module, entry: Entry, seed: int, *, numbered: bool) -> dict[str, Tensor]:
    batch = inputs(model, entry.inputs, seed, entry.images)
    return batch | {"number_of_the_row": torch.arange(ROWS)} if numbered else batch


def _policy(remedies: tuple[str, ...]) -> sf.Policy:
    """Routers of mixtures of experts convert themselves to float32, which an exception does for them."""
    return sf.Policy.bf16(exceptions={"router": torch.float32} if "exceptions" in remedies else {})


def _loss(apply: Callable[..., Any], policy: sf.Policy | None, *, keyed: bool) -> Callable[..., Any]:
    def loss(params: dict[str, Tensor], batch: dict[str, Tensor], *key: Tensor) -> Tensor:
        given = dict(batch)
        f = apply.keyed(*key, given.pop("number_of_the_row")) if keyed else apply  # pyright: ignore
        out = f(params, **given)
        if getattr(out, "loss", None) is not None:
            return out.loss
        # A model without labels: the mean of the squares of its results.
        found = [x for x in tree_leaves(dict(out)) if isinstance(x, Tensor) and x.is_floating_point()]
        return torch.stack([x.square().mean() for x in found if x.requires_grad]).mean()

    return loss if policy is None else sf.mixed_precision(loss, policy)


def _reference(
    name: str, model: nn.Module, policy: sf.Policy | None, batches: list[dict[str, Tensor]], options: dict[str, Any]
) -> Run:
    """One device on the halves of each batch in turn, so that it rounds the same sums as two ranks.

    By torch's own `functional_call`, unless a policy's buffers or keys need `from_module`.
    """
    params, apply = sf.from_module(model)

    def plain(params: dict[str, Tensor], **batch: Tensor) -> Any:
        return torch.func.functional_call(model, params, kwargs=batch)

    loss = _loss(plain if policy is None and not options else apply, policy, keyed=bool(options))
    want = one_device(loss, TX, params, batches, parts=WORLD, **options)
    if policy is None and not ZOO[name].coupled:
        # The halves equal the whole. Some models compute in float32 inside, for every dtype.
        whole = one_device(loss, TX, params, batches[:1], **options)
        for k, x in whole.metrics[0].items():
            torch.testing.assert_close(want.metrics[0][k].double(), x.double(), rtol=RTOL[torch.float32], atol=0)
    return want
