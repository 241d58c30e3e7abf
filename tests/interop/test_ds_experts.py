"""Covers DeepSpeed's files of experts, native and AutoEP's: weights by name, missing files, refusals."""

import pathlib
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import interop
from shardfn.nn import moe
from shardfn.testing import distributed

NATIVE = "blocks.{}.moe.deepspeed_moe.experts.deepspeed_experts.{}.{}"
NUMBERS = [3, 2]


def weight(layer: int, expert: int, name: str) -> torch.Tensor:
    shape = {"fc1.weight": (5, 4), "fc1.bias": (5,), "fc2.weight": (4, 5), "w1": (5, 4), "w2": (4, 5), "w3": (5, 4)}
    made = torch.Generator().manual_seed(100 * layer + 10 * expert + len(name))
    return torch.randn(shape[name], generator=made).bfloat16()


def rest() -> dict[str, torch.Tensor]:
    gates = {f"blocks.{i}.moe.deepspeed_moe.gate.wg.weight": torch.ones(n, 4) for i, n in enumerate(NUMBERS)}
    return {"head.weight": torch.ones(3, 4).bfloat16(), "steps": torch.tensor(7), **gates}


def write(place: pathlib.Path, *, autoep: bool = False, **more: Any) -> None:
    place.mkdir(parents=True)
    (place.parent / "latest").write_text(place.name)
    for layer, num in enumerate(NUMBERS):
        for e in range(num):
            if autoep:
                kept = {f"layers.{layer}.mlp.experts.{w}.{e}": weight(layer, e, w) for w in ("w1", "w2", "w3")}
            else:
                names = ("fc1.weight", "fc1.bias", "fc2.weight")
                kept = {NATIVE.format(layer, e, name): weight(layer, e, name) for name in names}
            torch.save(kept, place / f"layer_{layer}_expert_{e}_mp_rank_00_model_states.pt")
    model = {"module": rest(), "buffer_names": ["steps"], "global_steps": 9, "skipped_steps": 2, "num_experts": NUMBERS}
    torch.save({**model, **more}, place / "mp_rank_00_model_states.pt")
    torch.save({"optimizer": None}, place / "expp_rank_0_mp_rank_00_optim_states.pt")


def test_native_experts_have_the_names_of_a_module_on_one_rank(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "tag")
    found = interop.read_deepspeed_weights(str(tmp_path))
    assert found.step == 7 and found.moments == {} and found.buffers["steps"] == 7
    assert "steps" not in found.params and found.params["head.weight"].dtype == torch.float32
    for layer, num in enumerate(NUMBERS):
        for e in range(num):
            for name in ("fc1.weight", "fc1.bias", "fc2.weight"):
                got = found.params[NATIVE.format(layer, e, name)]
                assert torch.equal(got, weight(layer, e, name).float())
    assert len(found.params) == 3 * sum(NUMBERS) + 3


def test_experts_of_autoep_are_one_leaf(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "tag", autoep=True)
    params = interop.read_deepspeed_weights(str(tmp_path), "tag").params
    for layer, num in enumerate(NUMBERS):
        for name in ("w1", "w2", "w3"):
            want = torch.stack([weight(layer, e, name).float() for e in range(num)])
            assert torch.equal(params[f"layers.{layer}.mlp.experts.{name}"], want)


@distributed(world=2)
def trained(directory: str) -> None:
    params = interop.read_deepspeed_weights(directory).params

    def stacked(name: str) -> torch.Tensor:
        return torch.stack([params[NATIVE.format(0, e, name)] for e in range(NUMBERS[0])])

    tree = {"w_up": stacked("fc1.weight"), "w_down": stacked("fc2.weight")}
    x_SD = torch.arange(24.0).view(6, 4) / 24

    def loss(exchange: Any) -> Any:
        def of(params: Any, x_SD: torch.Tensor) -> torch.Tensor:
            return (
                moe.apply(moe.gelu_experts, params, x_SD, moe.top_k(x_SD[:, :3], 2), exchange=exchange).square().mean()
            )

        return of

    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        tx, specs = sf.optim.sgd(0.1), sf.P("ep")
        step = sf.sharded_step(loss(moe.Tokens("ep")), tx, mesh=mesh, specs=specs, batch=sf.P("ep"))
        _, metrics = step(step.init(tree), x_SD.chunk(2)[mesh.rank])
        torch.testing.assert_close(metrics["loss"], loss(moe.Local())(tree, x_SD), rtol=1e-6, atol=0)


def test_native_experts_train_on_two_ranks(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "tag")
    trained(str(tmp_path))


def test_experts_without_files_are_named(tmp_path: pathlib.Path) -> None:
    place = tmp_path / "tag"
    write(place)
    (place / "layer_0_expert_2_mp_rank_00_model_states.pt").rename(tmp_path / "kept")
    (place / "layer_1_expert_0_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"(?s)layers have \[3, 2\].*expert 2 of layer 0.*expert 0 of layer 1"):
        interop.read_deepspeed_weights(str(tmp_path))
    (tmp_path / "kept").rename(place / "layer_0_expert_3_mp_rank_00_model_states.pt")
    with pytest.raises(FileNotFoundError, match="expert 2 of layer 0"):
        interop.read_deepspeed_weights(str(tmp_path))


def test_older_checkpoints_have_no_numbers_of_experts(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "tag", num_experts=None)
    assert len(interop.read_deepspeed_weights(str(tmp_path)).params) == 3 * sum(NUMBERS) + 3
    (tmp_path / "tag" / "layer_0_expert_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(FileNotFoundError, match="expert 1 of layer 0"):
        interop.read_deepspeed_weights(str(tmp_path))


def test_files_that_do_not_fit_are_refused(tmp_path: pathlib.Path) -> None:
    def refused(said: str, change: Any, **more: Any) -> None:
        place = tmp_path / f"t{len(list(tmp_path.iterdir()))}" / "tag"
        write(place, **more)
        change(place)
        with pytest.raises(ValueError, match=said):
            interop.read_deepspeed_weights(str(place.parent))

    def first(place: pathlib.Path) -> pathlib.Path:
        return place / "layer_0_expert_0_mp_rank_00_model_states.pt"

    refused("more experts than layers have", lambda place: None, num_experts=[2, 2])
    refused(
        "is no weight of expert 0", lambda place: torch.save({NATIVE.format(0, 1, "w"): torch.ones(2)}, first(place))
    )
    refused("has 'note', and is to have tensors", lambda place: torch.save({"note": "x"}, first(place)))
    refused(
        "are there twice.*\n.*fc1.bias",
        lambda place: torch.save(
            {"module": {NATIVE.format(0, 0, "fc1.bias"): torch.ones(5)}}, place / "mp_rank_00_model_states.pt"
        ),
    )
    refused(
        "several model-parallel ranks",
        lambda place: first(place).rename(place / "layer_0_expert_0_mp_rank_01_model_states.pt"),
    )

    def none(place: pathlib.Path) -> None:
        for path in place.glob("layer_*"):
            path.unlink()

    refused("read_deepspeed reads it, with its moments", none)
    refused("states of the optimizer's ranks, as AutoEP", none, ds_autoep_layers=[{"moe_layer_id": 0}])
    refused("of no layer", lambda place: first(place).rename(place / "expert_0_mp_rank_00_model_states.pt"))
