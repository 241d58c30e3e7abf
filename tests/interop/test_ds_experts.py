"""Covers DeepSpeed's files of experts, native and AutoEP's: weights, states by name, missing files, refusals."""

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
        step = sf.sharded_step(loss(moe.AllToAll("ep")), tx, mesh=mesh, specs=specs, batch=sf.P("ep"))
        _, metrics = step(step.init(tree), x_SD.chunk(2)[mesh.rank])
        torch.testing.assert_close(metrics["loss"], loss(moe.Local())(tree, x_SD), rtol=1e-6, atol=0)


@pytest.mark.nightly
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
        "is not a weight of expert 0", lambda place: torch.save({NATIVE.format(0, 1, "w"): torch.ones(2)}, first(place))
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


RANKS, EP, LOCAL = 4, 2, 2  # experts of a rank
FUSED = "layers.{}.mlp.experts.w1"


def value(name: str, kind: str) -> torch.Tensor:
    """A parameter or moment of the module on one rank."""
    shape = (EP * LOCAL, 3, 5) if name == FUSED.format(0) else {"w": (3, 2), "b": (3,)}.get(name[-1], (7, 2))
    made = torch.Generator().manual_seed(sum(map(ord, name + kind)))
    return torch.randn(shape, generator=made)


def names_of(rank: int, kind: str) -> list[tuple[str, torch.Tensor]]:
    """The experts' tensors of a rank among the experts, by its own names."""
    own = [(e, rank * LOCAL + e) for e in range(LOCAL)]
    native = [(NATIVE.format(0, e, n), value(NATIVE.format(0, g, n), kind)) for e, g in own for n in ("w", "b")]
    fused = FUSED.format(0)
    return [*native, (fused, value(fused, kind)[rank * LOCAL : (rank + 1) * LOCAL])]


def write_states(place: pathlib.Path, *, data_first: bool, wrong: bool = False) -> None:
    """The files of four ranks at stage 1; two by two they have the same experts."""
    kinds = ("fp32", "exp_avg", "exp_avg_sq")
    dense = {kind: value("head.weight", kind) for kind in kinds}
    for e in range(EP * LOCAL):
        kept = {NATIVE.format(0, e, n): value(NATIVE.format(0, e, n), "fp32") for n in ("w", "b")}
        kept[f"{FUSED.format(0)}.{e}"] = value(FUSED.format(0), "fp32")[e]
        torch.save(kept, place / f"layer_0_expert_{e}_mp_rank_00_model_states.pt")
    shapes = [{"head.weight": dense["fp32"].shape}, {name: tuple(x.shape) for name, x in names_of(0, "fp32")}]
    torch.save(
        {
            "module": {"head.weight": dense["fp32"]},
            "num_experts": [EP * LOCAL],
            "param_shapes": shapes,
            "ds_config": {"use_data_before_expert_parallelism": data_first != wrong},
        },
        place / "mp_rank_00_model_states.pt",
    )
    for rank in range(RANKS):
        e, i = divmod(rank, RANKS // EP) if data_first else (rank % EP, rank // EP)
        parts: list[dict[str, torch.Tensor]] = [{}, {}]
        for kind in kinds:
            for number, (flat, n, at) in enumerate(
                (
                    (dense[kind].flatten(), RANKS, rank),
                    (torch.cat([x.flatten() for _, x in names_of(e, kind)]), RANKS // EP, i),
                )
            ):
                size = 2 * -(-len(flat) // (2 * n))
                parts[number][kind] = torch.cat([flat, flat.new_zeros(n * size - len(flat))]).split(size)[at]
        inner = {k: {"step": torch.tensor(5.0), **{x: p[x] for x in kinds[1:]}} for k, p in enumerate(parts)}
        optim = {
            "single_partition_of_fp32_groups": [p["fp32"] for p in parts],
            "base_optimizer_state": {"state": inner},
            "partition_count": [RANKS, RANKS // EP],
        }
        torch.save({"optimizer_state_dict": optim}, place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


@pytest.mark.parametrize("data_first", [False, True])
def test_states_of_the_optimizer_have_the_names_of_one_rank(tmp_path: pathlib.Path, data_first: bool) -> None:
    place = tmp_path / "tag"
    place.mkdir()
    write_states(place, data_first=data_first)
    found = interop.read_deepspeed_experts(str(tmp_path), "tag")
    names = {NATIVE.format(0, e, n) for e in range(EP * LOCAL) for n in ("w", "b")} | {"head.weight", FUSED.format(0)}
    assert found.step == 5 and found.params.keys() == names
    for kind, tree in {"fp32": found.params, **found.moments}.items():
        for name in names:
            assert torch.equal(tree[name], value(name, kind)), (kind, name)
    write_states(place, data_first=data_first, wrong=True)
    with pytest.raises(ValueError, match=r"(?s)weights of experts are not the optimizer's, rounded.*experts\.2\.w"):
        interop.read_deepspeed_experts(str(tmp_path), "tag")
    (place / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"no optimizer states of ranks \[2\]"):
        interop.read_deepspeed_experts(str(tmp_path), "tag")
    with pytest.raises(ValueError, match="Read the checkpoint with read_deepspeed_experts"):
        interop.read_deepspeed(str(tmp_path), "tag")


def write_numbered(place: pathlib.Path, groups: list[list[int]], moe: list[list[int]]) -> None:
    """Stage 0: `write` with states of an optimizer by number; three and two experts, of one rank."""
    write(place, param_shapes=None)
    names = list(interop.read_deepspeed_weights(str(place.parent), place.name).params)
    order = [x for x in names if "experts" not in x] + [x for x in names if "experts" in x]
    params = interop.read_deepspeed_weights(str(place.parent), place.name).params
    state = {i: {"step": torch.tensor(7.0), "exp_avg": params[name] + 1} for i, name in enumerate(order)}
    sets = [{"params": x} for x in groups] + [{"params": x, "moe": True} for x in moe]
    torch.save({"optimizer": {"state": state, "param_groups": sets}}, place / "expp_rank_0_mp_rank_00_optim_states.pt")


def test_states_by_number_get_names_where_groups_determine_them(tmp_path: pathlib.Path) -> None:
    dense, num = 3, 3 * sum(NUMBERS)
    experts = [*range(dense, dense + num)]
    write_numbered(tmp_path / "one" / "tag", [[0, 1, 2]], [experts[:4], experts[4:]])
    found = interop.read_deepspeed_experts(str(tmp_path / "one"))
    assert found.step == 7 and found.moments.keys() == {"exp_avg"}
    assert all(torch.equal(found.moments["exp_avg"][name], x + 1) for name, x in found.params.items())
    for i, (groups, moe_groups) in enumerate((([[0], [1, 2]], [experts]), ([[0, 1, 2]], [experts[:-1]]))):
        write_numbered(tmp_path / str(i) / "tag", groups, moe_groups)
        with pytest.raises(ValueError, match="Save at stage 1 or 2, where parameters have names"):
            interop.read_deepspeed_experts(str(tmp_path / str(i)))
    write(tmp_path / "none" / "tag", param_shapes=None)
    with pytest.raises(ValueError, match="no states of a plain optimizer"):
        interop.read_deepspeed_experts(str(tmp_path / "none"))
