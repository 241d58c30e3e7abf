"""Covers `pipeline_module`: unmodified Hugging Face decoders in stages equal one device."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import shardfn as sf
from shardfn import P, Zero, core, optim
from shardfn.lora import LoRA
from shardfn.modules import from_module
from shardfn.testing import assert_parity, distributed

V, T, ROWS = 33, 6, 8
_LLAMA: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _gpt2(layers: int, tied: bool) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=V, n_embd=16, n_layer=layers, n_head=4, n_positions=16, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=tied, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _bloom(layers: int, tied: bool) -> nn.Module:
    config = transformers.BloomConfig(
        vocab_size=V, hidden_size=16, n_layer=layers, n_head=4, bos_token_id=1, eos_token_id=2, tie_word_embeddings=tied
    )
    return transformers.BloomForCausalLM(config)


def _of(name: str, **more: Any) -> Callable[[int, bool], nn.Module]:
    def make(layers: int, tied: bool) -> nn.Module:
        config = getattr(transformers, f"{name}Config")(
            **_LLAMA | more, num_hidden_layers=layers, tie_word_embeddings=tied
        )
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return make


MODELS: dict[str, tuple[Callable[[int, bool], nn.Module], str]] = {
    "gpt2": (_gpt2, "transformer.h"),
    "llama": (_of("Llama"), "model.layers"),
    "qwen2": (_of("Qwen2", use_sliding_window=True, sliding_window=3, max_window_layers=1), "model.layers"),
    "mistral": (_of("Mistral", sliding_window=3), "model.layers"),
    "bloom": (_bloom, "transformer.h"),
    "gemma2": (_of("Gemma2", head_dim=4, sliding_window=3), "model.layers"),  # layers differ in their computation
}


def _made(name: str, layers: int, tied: bool, dtype: torch.dtype) -> tuple[dict[str, Any], Any, Any, str]:
    """Parameters, the pipelined module's loss, and the plain one: of torch's own call, parameter by parameter."""
    make, path = MODELS[name]
    torch.manual_seed(0)
    module = make(layers, tied).to(dtype).eval()
    module, alone = copy.deepcopy(module), module  # torch's own call of a checkpointed one would go wrong
    params, apply = from_module(module, layers=path)

    def loss(params: Any, batch: Any) -> Tensor:
        return apply(params, **batch, use_cache=False).loss

    def plain(params: Any, batch: Any) -> Tensor:
        flat = {k: v for k, v in params.items() if k != path}
        for leaf, rows in params[path].items():
            flat |= {f"{path}.{i}.{leaf}": row for i, row in enumerate(rows)}
        return torch.func.functional_call(alone, flat, kwargs={**batch, "use_cache": False}).loss

    return params, (loss, apply), plain, path


def _batches(mask: bool, num: int = 2) -> list[Any]:
    g = torch.Generator().manual_seed(1)
    out = []
    for _ in range(num):
        ids = torch.randint(3, V, (ROWS, T), generator=g)
        out.append({"input_ids": ids, "labels": ids})
        if mask:  # padding on the right
            out[-1]["attention_mask"] = (torch.arange(T) < torch.arange(ROWS)[:, None] % 3 + T - 2).long()
    return out


def _parity(
    name: str, mesh: sf.Mesh, *, layers: int = 4, tied: bool = True, dtype: Any, m: int = 2, **options: Any
) -> None:
    params, (loss, apply), plain, path = _made(name, layers, tied, dtype)
    mask = options.pop("mask", False)
    if options.pop("checkpointed", False):
        apply.module.activation_checkpointing_enable()
        apply.module.train()
        for part in apply.module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
    schedule = options.pop("schedule", "1f1b")
    piped = sf.pipeline_module(loss, apply, num_microbatches=m, schedule=schedule)
    specs = {key: P("pp") if key == path else P() for key in params}
    # Adam magnifies the rounding of gradients near zero, and such small models have many of these.
    optimizer = optim.adamw(1e-2) if dtype == torch.float64 else optim.sgd(0.1, momentum=0.9)
    assert_parity(
        piped, optimizer, params, _batches(mask), mesh=mesh, reference=plain, specs=specs, batch=P("dp"),
        **options,
    )  # fmt: skip
    assert not apply.needs_params


IN_FLOAT32 = {"gemma2"}  # its norms multiply by their weights in float32, for all dtypes
DAILY = {"llama", "gemma2"}
NAMES = [name if name in DAILY else pytest.param(name, marks=pytest.mark.nightly) for name in MODELS]


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
@distributed(world=[2, 3])
def test_stages_equal_one_device(world: int, name: str) -> None:
    mesh = sf.make_mesh({"pp": world}, device="cpu")
    if name not in IN_FLOAT32:
        _parity(name, mesh, dtype=torch.float64)
    _parity(name, mesh, dtype=torch.float32, tied=False, layers=5, schedule="gpipe", mask=True)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", MODELS)
@distributed(world=4)
def test_with_zero(name: str, stage: int) -> None:
    mesh = sf.make_mesh({"dp": 2, "pp": 2}, device="cpu")
    for tied, dtype in ((True, torch.float64), (False, torch.float32))[name in IN_FLOAT32 :]:
        _parity(name, mesh, tied=tied, dtype=dtype, zero=Zero(stage=stage, persist_elements=0), layers=3)


TARGETS = [r"(q|v|down)_proj", "embed_tokens"]  # in the layers, and before them


def _with_adapters(params: dict[str, Any], path: str) -> tuple[LoRA, dict[str, Any]]:
    """Adapters that change the model, and the parameters with them."""
    cuts = {key: P("pp") if key == path else P() for key in params}
    lora = LoRA.of(params, TARGETS, rank=2, alpha=6.0, specs=cuts)
    own = lora.init(sf.key(1), dtype=params[path]["mlp.down_proj.weight"].dtype)
    g = torch.Generator().manual_seed(2)
    for adapter in own.values():
        adapter["b"] = torch.randn(adapter["b"].shape, generator=g, dtype=adapter["b"].dtype) / 8
    return lora, {"base": params, "lora": own}


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 3])
@distributed(world=[2, 4])
def test_adapters_lie_with_their_layers(world: int, stage: int) -> None:
    params, (loss, apply), plain, path = _made("llama", 4, False, torch.float64)
    lora, tree = _with_adapters(params, path)

    def whole(tree: Any, batch: Any) -> Tensor:
        """The loss of torch's own call, with sums of weights and products."""
        summed = {key: dict(x) if key == path else x for key, x in tree["base"].items()}
        for name, own in tree["lora"].items():
            at, key = (summed[path], name.removeprefix(f"{path}.")) if name.startswith(path) else (summed, name)
            at[key] = at[key] + 3.0 * own["b"] @ own["a"]
        return plain(summed, batch)

    mesh = sf.make_mesh({"dp": world // 2, "pp": 2}, device="cpu")
    piped = sf.pipeline_module(loss, apply, num_microbatches=2, adapters=lora)
    assert_parity(
        piped, optim.sgd(0.1, momentum=0.9), tree, _batches(True), mesh=mesh, reference=whole, specs=lora.specs,
        trainable=lora.trainable, batch=P("dp"), zero=Zero(stage=stage, persist_elements=0),
    )  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
@distributed(world=2)
def test_adapters_of_another_dtype_in_stages(world: int, base: torch.dtype) -> None:
    """They are trained with the bits of one device, in their own dtype."""
    dtype = torch.bfloat16 if base == torch.float32 else torch.float32
    params, (loss, apply), _, path = _made("llama", 4, False, base)
    lora, tree = _with_adapters(params, path)
    tree["lora"] = {name: {k: x.to(dtype) for k, x in own.items()} for name, own in tree["lora"].items()}
    piped = sf.pipeline_module(loss, apply, num_microbatches=2, adapters=lora)
    whole = sf.accumulate(lora.adapt(loss), 2)
    found = []
    for f, mesh, specs in ((piped, sf.make_mesh({"pp": 2}, device="cpu"), lora.specs), (whole, None, P())):
        mesh = sf.make_mesh({}, alone=True) if mesh is None else mesh
        step = sf.sharded_step(f, optim.sgd(0.1), mesh=mesh, specs=specs, trainable=lora.trainable, batch=P())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*trained in torch.bfloat16 without a policy")
            state = step.init(tree)
        for batch in _batches(True):
            state, _ = step(state, batch)
        found.append([x.full_tensor() for x in core.tree_leaves(state.params["lora"])])
    before = core.tree_leaves(tree["lora"])
    assert all(x.dtype == dtype and torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(found[0], before, strict=True))


def test_adapters_that_do_not_fit() -> None:
    params, (loss, apply), _, path = _made("llama", 2, False, torch.float32)
    lora, _ = _with_adapters(params, path)
    piped = sf.pipeline_module(loss, apply, adapters=lora)
    with pytest.raises(ValueError, match=r"Pass \{'base': params, 'lora': adapters\}"):
        piped(params, _batches(False)[0])


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
@distributed(world=2)
def test_split_backwards(name: str) -> None:
    mesh = sf.make_mesh({"pp": 2}, device="cpu")
    for checkpointed in (False, True):
        dtype = torch.float32 if name in IN_FLOAT32 else torch.float64
        _parity(name, mesh, dtype=dtype, schedule="zb-h1", m=4, checkpointed=checkpointed)


@pytest.mark.nightly
@distributed(world=2)
def test_keys_give_the_masks_of_one_device() -> None:
    params, (_, apply), _, path = _made("gpt2", 4, True, torch.float64)
    apply.module.train()

    def loss(params: Any, batch: Any, key: Tensor) -> Tensor:
        run = apply.keyed(key, batch["rows"])
        return run(params, input_ids=batch["ids"], labels=batch["ids"], use_cache=False).loss

    mesh = sf.make_mesh({"pp": 2}, device="cpu")
    batches = [{"ids": b["input_ids"], "rows": torch.arange(ROWS)} for b in _batches(False)]
    specs = {key: P("pp") if key == path else P() for key in params}
    piped = sf.pipeline_module(loss, apply, num_microbatches=2)
    run = assert_parity(
        piped, optim.sgd(0.1), params, batches, mesh=mesh, reference=loss, specs=specs, batch=P(), key=sf.key(3)
    )
    undropped = apply.module.eval()
    assert run.metrics[0]["loss"] != undropped(input_ids=batches[0]["ids"], labels=batches[0]["ids"]).loss


@pytest.mark.nightly
@distributed(world=4)
def test_evaluation_runs_stage_after_stage() -> None:
    params, (loss, apply), plain, path = _made("llama", 5, True, torch.float64)
    mesh = sf.make_mesh({"pp": 4}, device="cpu")  # 2, 2, 1 and no layers
    specs = {key: P("pp") if key == path else P() for key in params}
    piped = sf.pipeline_module(loss, apply, num_microbatches=2)
    step = sf.sharded_step(piped, optim.sgd(0.1), mesh=mesh, specs=specs, batch=P())
    (batch,) = _batches(True, 1)
    state = step.init(params)
    torch.testing.assert_close(step.apply(piped, state, batch), plain(params, batch), rtol=1e-12, atol=0)


@pytest.mark.nightly
@distributed(world=2)
def test_unequal_numbers_of_layers() -> None:
    params, (loss, apply), plain, path = _made("llama", 5, True, torch.float64)
    mesh, per_stage = sf.make_mesh({"pp": 2}, device="cpu"), (4, 1)
    params = {**params, path: sf.pad_layers(params[path], per_stage)}
    piped = sf.pipeline_module(loss, apply, num_microbatches=2, layers_per_stage=per_stage)
    specs = {key: P("pp") if key == path else P() for key in params}

    def unpadded(params: Any, batch: Any) -> Tensor:
        return plain({**params, path: sf.unpad_layers(params[path], per_stage)}, batch)

    how: Any = {"params": params, "batches": _batches(False), "specs": specs, "batch": P(), "reference": unpadded}
    assert_parity(piped, optim.adamw(1e-2, weight_decay=0.1), mesh=mesh, **how)
    assert_parity(
        piped, optim.adamw(1e-2), mesh=sf.make_mesh({"dp": 2}, device="cpu"), **how | {"batch": P("dp"), "specs": P()}
    )


class _Net(nn.Module):
    """Layers, called in a way that `order` names."""

    def __init__(self, order: str = "plain", layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order = order
        self.embed = nn.Linear(3, 5)
        self.layers = nn.ModuleList(_Layer() for _ in range(layers))
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        start = h = self.embed(x)
        layers = list(self.layers)
        if self.order == "twice":
            layers.insert(2, layers[1])
        elif self.order == "reversed":
            layers.reverse()
        elif self.order == "some":
            layers.pop()
        seen = []
        for layer in layers:
            seen.append(h)
            h = layer(
                h, start if self.order == "of params" else seen[1] if self.order == "skips" and seen[1:] else None
            )
        if self.order == "branches":
            return h if h.sum() > seen[2].sum() else -h
        return self.head(h + seen[2] if self.order == "sums" else h + start if self.order == "resumes" else h)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, h: Tensor, more: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.linear(h))
        return h if more is None else h + more


def _net(order: str, mesh: sf.Mesh) -> Any:
    params, apply = from_module(_Net(order).double(), layers="layers")

    def loss(params: Any, x: Tensor) -> Tensor:
        return apply(params, x).square().mean()

    specs = {key: P("pp") if key == "layers" else P() for key in params}
    piped = sf.pipeline_module(loss, apply, num_microbatches=2)
    batches = [torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))]
    assert_parity(piped, optim.sgd(0.1), params, batches, mesh=mesh, specs=specs, batch=P())
    return apply


@distributed(world=2)
def test_arguments_of_layers_that_are_made_of_parameters_are_computed_at_their_use() -> None:
    mesh = sf.make_mesh({"pp": 2}, device="cpu")
    for order in ("plain", "of params", "resumes"):
        apply = _net(order, mesh)
        assert apply.needs_params == (order != "plain" and mesh.coords["pp"] == 1)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("skips", "something besides the next layer uses the result of a layer"),
        pytest.param("sums", "something besides the next layer uses the result of a layer", marks=pytest.mark.nightly),
        pytest.param(
            "branches", "something besides the next layer uses the result of a layer", marks=pytest.mark.nightly
        ),
    ],
)
@distributed(world=2)
def test_values_that_stages_cannot_hand_on_are_refused(order: str, said: str) -> None:
    mesh = sf.make_mesh({"pp": 2}, device="cpu")
    with pytest.raises((ValueError, sf.RankError), match=said):
        _net(order, mesh)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("twice", "calls layer 1 where layer 2 should be"),
        pytest.param("reversed", "calls layer 3 where layer 0 should be", marks=pytest.mark.nightly),
        pytest.param("some", "calls 3 of 4 layers", marks=pytest.mark.nightly),
    ],
)
def test_layers_that_do_not_run_once_each_in_order_are_refused(order: str, said: str) -> None:
    params, apply = from_module(_Net(order), layers="layers")
    with pytest.raises(ValueError, match=said):
        apply(params, torch.zeros(2, 3))


def test_lists_that_cannot_be_stacked_are_refused() -> None:
    net = _Net()
    with pytest.raises(ValueError, match=r"layers must be one of \['layers'\], .* this _Net, got 'blocks'"):
        from_module(net, layers="blocks")
    layers: Any = net.layers
    layers[2].linear.weight = layers[3].linear.weight
    layers[0].linear.bias = net.embed.bias
    said = (
        r"(?s)share parameters.*layers\.0\.linear\.bias is embed\.bias.*layers\.2\.linear\.weight is layers\.3\.linear"
    )
    with pytest.raises(ValueError, match=said):
        from_module(net, layers="layers")
    with pytest.raises(ValueError, match="has_state"):
        from_module(_Net(), layers="layers", has_state=True)  # pyright: ignore[reportCallIssue]


def test_losses_and_functions_that_do_not_fit_are_refused() -> None:
    params, apply = from_module(_Net(), layers="layers")
    x = torch.zeros(2, 3)
    with pytest.raises(TypeError):
        sf.pipeline_module(lambda p, x: x.sum(), from_module(_Net())[1])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="should have 4 layers"):
        apply({**params, "layers": {k: v[:2] for k, v in params["layers"].items()}}, x)
    with pytest.raises(
        ValueError, match=r"params\['layers'\] must have the parameters of the layers.*got \['weight'\]"
    ):
        apply({**params, "layers": {"weight": torch.zeros(4, 5, 5)}}, x)


@distributed(world=2)
def test_losses_that_call_the_module_otherwise_than_once_are_refused() -> None:
    mesh = sf.make_mesh({"pp": 2}, device="cpu")
    params, apply = from_module(_Net(), layers="layers")
    specs = {key: P("pp") if key == "layers" else P() for key in params}
    losses = {
        "calls the module twice": lambda p, x: (apply(p, x) - apply(p, -x)).sum(),
        "does not call the module": lambda p, x: p["head.bias"].sum(),
    }
    for said, loss in losses.items():
        step = sf.sharded_step(sf.pipeline_module(loss, apply), optim.sgd(0.1), mesh=mesh, specs=specs, batch=P())
        with pytest.raises((ValueError, sf.RankError), match=said):
            step(step.init(params), torch.zeros(2, 3))
    piped = sf.pipeline_module(lambda tree, x: apply(tree["base"], x).sum(), apply)
    step = sf.sharded_step(piped, optim.sgd(0.1), mesh=mesh, specs={"base": specs, "lora": P()}, batch=P())
    said = r"params must have the function's layers at 'layers', got \['base', 'lora'\]. Pass the parameters"
    with pytest.raises((ValueError, sf.RankError), match=said):
        step.init({"base": params, "lora": torch.zeros(1)})


@distributed(world=2)
def test_a_captured_stage_of_torchs_norms_and_an_attention_body_equals_one_device() -> None:
    """A run of a layer without data, for the structure of its results, leaves no operation in the graph."""
    model = _of("Llama", num_attention_heads=2, num_key_value_heads=1)(2, False).double()
    for path, norm in [*model.named_modules()]:
        if type(norm).__name__ == "LlamaRMSNorm":
            parent, _, last = path.rpartition(".")
            setattr(model.get_submodule(parent), last, nn.RMSNorm(16, eps=1e-6, dtype=torch.float64))
    ids = torch.randint(V, (4, T), generator=torch.Generator().manual_seed(0))
    params, apply = from_module(model, layers="model.layers", attention=sf.nn.Blockwise(2))
    loss = sf.pipeline_module(sf.interop.causal_lm_loss(apply), apply, num_microbatches=2)
    specs = {k: P("pp") if isinstance(v, dict) else P() for k, v in params.items()}
    mesh = sf.make_mesh({"pp": 2}, device="cpu")
    step = sf.sharded_step(sf.jit(loss, backend="graph"), optim.sgd(0.1), mesh=mesh, specs=specs, batch=P())
    rows = sf.interop.causal_lm_batch(sf.nn.Blockwise(2), {"input_ids": ids}, mesh)
    _, metrics = step(step.init(params), rows)
    torch.testing.assert_close(
        metrics["loss"], model(input_ids=ids, labels=ids).loss.detach().to(metrics["loss"].dtype)
    )
