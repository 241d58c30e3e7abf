"""Covers files of transformers with experts one by one against fused leaves: bytes, own experts alone, refusals."""

import itertools
import pathlib
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.interop import Archive, module_from_hf, module_to_hf, without_weights
from shardfn.interop._hf_module import ConvertedArchive, as_module
from shardfn.nn import moe
from shardfn.testing import distributed

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "num_experts_per_tok": 2,
    "use_cache": False,
}


def mixtral(num: int = 3) -> Any:
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=num))


def qwen3() -> Any:
    torch.manual_seed(0)
    fields = {"num_experts": 3, "moe_intermediate_size": 12, "head_dim": 4}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **fields))


def ernie() -> Any:
    torch.manual_seed(0)
    fields = {"moe_num_experts": 3, "moe_k": 2, "moe_intermediate_size": 12, "moe_layer_start_index": 0}
    return transformers.Ernie4_5_MoeForCausalLM(transformers.Ernie4_5_MoeConfig(**SIZES, **fields))


MODELS = {"mixtral": mixtral, "qwen3": qwen3, "ernie": ernie}
FUSED = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize("name", MODELS)
def test_experts_one_by_one_are_read_into_fused_leaves_and_written_back(name: str, tmp_path: pathlib.Path) -> None:
    module = MODELS[name]()
    module.save_pretrained(tmp_path / "theirs")
    assert any(".experts.2." in key for key in Archive(tmp_path / "theirs"))
    with without_weights():
        empty = MODELS[name]()
    read: dict[str, Any] = module_from_hf(empty, tmp_path / "theirs")
    assert all(torch.equal(read[key].full(), p) for key, p in module.named_parameters())
    module_to_hf(empty, {key: x.full() for key, x in read.items()}, tmp_path / "ours")
    for path in (tmp_path / "theirs").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "ours" / path.name).read_bytes()


def test_any_box_of_a_fused_leaf(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = mixtral()
    module.save_pretrained(tmp_path)
    archive = as_module(Archive(tmp_path), module, dict(module.named_parameters()))
    assert isinstance(archive, ConvertedArchive) and len(archive) == len(list(archive))
    whole = module.get_parameter(FUSED)
    read: list[int] = []
    plain: Any = Archive.box
    monkeypatch.setattr(Archive, "box", lambda *args: read.append(out := plain(*args)) or out)
    cuts = itertools.product([(0, 3), (1, 2), (2, 2)], [(0, 24), (5, 20), (12, 24), (3, 7)], [(0, 8), (2, 5)])
    for box in cuts:
        read.clear()
        want = whole[tuple(slice(*b) for b in box)]
        assert torch.equal(archive.box(FUSED, box), want)
        assert sum(x.numel() for x in read) == want.numel()  # pyright: ignore[reportAttributeAccessIssue]


def test_files_under_the_names_of_the_module_are_read_too(tmp_path: pathlib.Path) -> None:
    module = mixtral()
    module.save_pretrained(tmp_path, save_original_format=False)
    assert FUSED in Archive(tmp_path)
    read: dict[str, Any] = module_from_hf(module, tmp_path)
    assert torch.equal(read[FUSED].full(), module.get_parameter(FUSED))


@distributed(world=2)
def own_experts_alone(directory: str) -> None:
    module, mesh = mixtral(), sf.make_mesh({"ep": 2}, device="cpu")
    if mesh.rank == 0:
        module.save_pretrained(f"{directory}/theirs")
    torch.distributed.barrier()
    with without_weights():
        empty = mixtral()
    _, apply = sf.from_module(empty, experts=moe.AllToAll("ep"))
    plain, read = Archive.box, []

    def box(self: Archive, name: str, box: Any, shape: Any = None) -> torch.Tensor:
        out = plain(self, name, box, shape)
        read.extend([(name, out.numel())] if ".experts." in name else [])
        return out

    Archive.box = box  # pyright: ignore[reportAttributeAccessIssue]
    try:
        step = sf.sharded_step(
            lambda p, x: apply(p, input_ids=x).logits.mean(),
            sf.optim.sgd(0.1),
            mesh=mesh,
            specs=apply.specs,
            batch=sf.P("ep"),
            zero=sf.Zero(stage=3, axis="ep", persist_elements=0),
        )
        state = step.init(module_from_hf(empty, f"{directory}/theirs"))
    finally:
        Archive.box = plain
    own = [0, 1] if mesh.rank == 0 else [2]
    wanted = {f"model.layers.0.block_sparse_moe.experts.{e}.w{i}.weight": 96 for e in own for i in (1, 2, 3)}
    # All ranks also read a few rows of each leaf, by which `init` finds leaves that differ among ranks.
    assert sorted(r for r in read if r[1] > 16) == sorted(wanted.items())
    assert sum(n for _, n in read if n <= 16) <= 96
    module_to_hf(empty, state.params, f"{directory}/ours")
    torch.distributed.barrier()
    ours, theirs = (pathlib.Path(directory, d, "model.safetensors").read_bytes() for d in ("ours", "theirs"))
    assert ours == theirs


def test_a_rank_reads_its_own_experts_alone(tmp_path: pathlib.Path) -> None:
    own_experts_alone(str(tmp_path))


@distributed(world=2)
def refused_on_each_rank(directory: str) -> None:
    with pytest.raises(ValueError, match=r"gate_up_proj is \(4, 24, 8\) in the file.*4 experts, and the module 3"):
        module_from_hf(mixtral(3), directory)


def test_another_number_of_experts_is_refused_on_each_rank(tmp_path: pathlib.Path) -> None:
    mixtral(4).save_pretrained(tmp_path)
    refused_on_each_rank(str(tmp_path))


def test_experts_without_all_of_their_parts_are_refused(tmp_path: pathlib.Path) -> None:
    from safetensors.torch import load_file, save_file

    module = mixtral()
    module.save_pretrained(tmp_path)
    kept = load_file(tmp_path / "model.safetensors")
    del kept["model.layers.0.block_sparse_moe.experts.1.w3.weight"]
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"gate_up_proj cannot be made of 3 of .*w1.weight, 2 of .*w3.weight"):
        module_from_hf(module, tmp_path)
