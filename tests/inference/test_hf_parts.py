"""Covers models of transformers whose weights stay in files: a rank reads its own parts, with the bits of the whole."""

import contextlib
import json
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardfn import RankError, core
from shardfn.core import P, block_slices
from shardfn.inference import Engine, Sampling, hf_decoder
from shardfn.interop import Archive, ArchiveWriter, module_from_hf, without_weights
from shardfn.memory import DamagedError
from shardfn.testing import distributed
from tests.inference.hf_models import MODELS
from tests.inference.test_hf import LIMITS, PROMPTS
from tests.inference.test_hf_ranks import logits_of, model_of

transformers = pytest.importorskip("transformers")

ROOT = pathlib.Path(__file__).parents[2]
DAY = ["gpt2", "llama", "mixtral"]
KINDS = [k if k in DAY else pytest.param(k, marks=pytest.mark.nightly) for k in MODELS]


def saved(model: Any, folder: pathlib.Path) -> pathlib.Path:
    """A directory with the files of a model, which the first rank writes."""
    model.save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()
    return folder


def empty(folder: pathlib.Path) -> Any:
    """The model of a directory, without weights."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with without_weights():
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Numbers of bytes of tensors that are read from files."""
    reads: list[int] = []
    plain: Any = Archive._read

    def read(*args: Any) -> None:
        reads.append(args[-1].nbytes)
        plain(*args)

    with mock.patch.object(Archive, "_read", read):
        yield reads


def own_bytes(params: Mapping[str, Tensor], specs: Mapping[str, P], mesh: core.Mesh) -> int:
    """The bytes of a rank's blocks."""
    blocks = [block_slices(tuple(x.shape), specs[name], mesh.shape, mesh.coords) for name, x in params.items()]
    return sum(4 * math.prod(s.stop - s.start for s in block) for block in blocks)


def compared_bytes(params: Mapping[str, Tensor]) -> int:
    """At most the bytes of the first elements of each leaf, by which ranks find that they have different ones."""
    return sum(4 * math.prod(min(4, n) for n in x.shape[:-1]) * x.shape[-1] for x in params.values())


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
@distributed(world=[2, 3])
def test_a_rank_reads_its_own_parts(world: int, kind: str, tmp_path: pathlib.Path) -> None:
    model, mesh = model_of(kind, world), core.make_mesh({"tp": world})
    folder = saved(model, tmp_path)
    whole, values = hf_decoder(model, tp="tp")
    with counted() as reads:
        module = empty(folder)
        cut, params = hf_decoder(module, tp="tp", params=module_from_hf(module, folder))
        assert not reads
        got = logits_of(cut, params, mesh, PROMPTS[2])
    assert torch.equal(got, logits_of(whole, values, mesh, PROMPTS[2]))
    assert (cut.specs, cut.packed, cut.linear, cut.batch_invariant) == (
        whole.specs,
        whole.packed,
        whole.linear,
        whole.batch_invariant,
    )
    if kind in ("llama", "mixtral"):  # others have weights [inputs, outputs], or parts that are joined in their files
        own = own_bytes(params, cut.specs, mesh)
        assert own <= sum(reads) <= own + compared_bytes(params)


@distributed(world=2)
def test_a_rank_of_two_reads_about_half_of_the_bytes(tmp_path: pathlib.Path) -> None:
    mesh = core.make_mesh({"tp": 2})
    folder = saved(MODELS["llama"](hidden_size=64, intermediate_size=256), tmp_path)
    module = empty(folder)
    cut, params = hf_decoder(module, tp="tp", params=module_from_hf(module, folder))
    with counted() as reads:
        Engine(cut, params, mesh=mesh, limits=LIMITS)
    share = sum(reads) / sum(4 * x.numel() for x in params.values())
    assert 0.5 < share < 0.56  # embeddings and norms are whole


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process, as Linux counts it")
def test_the_memory_of_a_rank_is_that_of_its_parts(tmp_path: pathlib.Path) -> None:
    program = ["tests.inference.resident", "make", str(tmp_path)]
    run_fresh("-m", *program)
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", program[0], "parts"]
    rows = [json.loads(line) for line in run_fresh(*ranks, str(tmp_path)).splitlines()]
    size = sum(file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors"))
    assert len(rows) == 2 and size > 390e6
    for row in rows:
        assert row["weights"] < 0.55 * size
        assert row["peak"] < row["planned"] + (112 << 20), rows  # graphs, and the leaf that is packed


def run_fresh(*command: str) -> str:
    """The output of a new process."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
@distributed(world=2)
def test_files_that_differ_between_ranks_are_named(tmp_path: pathlib.Path) -> None:
    mesh, model = core.make_mesh({"tp": 2}), MODELS["llama"]()
    folder = saved(model, tmp_path)
    module = empty(folder)
    cut, params = hf_decoder(module, tp="tp", params=module_from_hf(module, folder))
    name = "model.norm.weight"
    if mesh.rank == 1:
        read: Any = params[name]
        params = {**params, name: 1 + read.full()}
    with pytest.raises(RankError, match=rf"different values of the same leaves.*same files(?s:.*){name}"):
        Engine(cut, params, mesh=mesh, limits=LIMITS)


@pytest.mark.nightly
@pytest.mark.parametrize("codes", [None, "int4"])
def test_one_device_generates_the_same_tokens(codes: Any, tmp_path: pathlib.Path) -> None:
    model = MODELS["gemma2"]()
    folder = saved(model, tmp_path)
    module = empty(folder)
    made, params = hf_decoder(module, quantization=codes, params=module_from_hf(module, folder))
    whole, values = hf_decoder(model, quantization=codes)
    how = Sampling(max_tokens=6, temperature=0.0)
    got, want = (Engine(*pair, limits=LIMITS).generate(PROMPTS, how) for pair in ((made, params), (whole, values)))
    assert made.batch_invariant and got == want


def test_a_probe_still_finds_layers_that_are_not_exact(tmp_path: pathlib.Path) -> None:
    folder = saved(MODELS["llama"](), tmp_path)
    module = empty(folder)
    params = module_from_hf(module, folder)

    class Beside(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.shape[-2]

    module.model.layers[1].mlp.act_fn = Beside()
    with pytest.raises(ValueError, match="the bits of a token's logits differ beside"):
        hf_decoder(module, tp="tp", params=params)


def test_weights_that_are_not_those_of_the_model_are_named(tmp_path: pathlib.Path) -> None:
    model = MODELS["llama"]()
    module = empty(saved(model, tmp_path))
    with pytest.raises(ValueError, match=r"its parameters are on meta\. .*params=module_from_hf"):
        hf_decoder(module)
    params: dict[str, Any] = dict(model.named_parameters())
    params["model.norm.weight"] = torch.ones(3)
    params["lm_head.wieght"] = params.pop("lm_head.weight")
    with pytest.raises(
        ValueError, match=r"params\['model.norm.weight'\] is \(3,\), and the model's is \(24,\)"
    ) as error:
        hf_decoder(module, params=params)
    assert "params has no lm_head.weight. Did you mean 'lm_head.wieght'?" in str(error.value)
    assert "params['lm_head.wieght'] is not a parameter of the model. Did you mean 'lm_head.weight'?" in str(
        error.value
    )


def rewritten(folder: pathlib.Path, changes: Mapping[str, Tensor]) -> None:
    """Writes the files of a directory again, with some tensors in place of others or beside them."""
    archive = Archive(folder)
    tensors = {name: archive.box(name, [(0, n) for n in kept.shape]) for name, kept in archive.items()} | dict(changes)
    with ArchiveWriter(folder, {name: (x.dtype, tuple(x.shape)) for name, x in tensors.items()}) as out:
        for name, x in tensors.items():
            out.put(name, x)


def test_a_file_that_is_cut_short_or_of_other_shapes_is_named(tmp_path: pathlib.Path) -> None:
    folder = saved(MODELS["llama"](), tmp_path)
    module = empty(folder)
    rewritten(folder, {"model.layers.1.self_attn.q_proj.weight": torch.zeros(24, 3)})
    with pytest.raises(ValueError, match=rf"(?s){folder}.*layers.1.self_attn.q_proj.weight is \(24, 3\) in the file"):
        module_from_hf(module, folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DamagedError, match=str(file)):
        module_from_hf(module, folder)


def test_a_file_that_is_cut_short_after_its_header_was_read_is_named(tmp_path: pathlib.Path) -> None:
    folder = saved(MODELS["llama"](), tmp_path)
    module = empty(folder)
    made, params = hf_decoder(module, params=module_from_hf(module, folder))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DamagedError, match=f"{file} ends before its tensors do"):
        Engine(made, params, limits=LIMITS)


def test_tensors_that_transformers_drops_are_passed_over(tmp_path: pathlib.Path) -> None:
    folder = saved(MODELS["llama"](), tmp_path)
    module = empty(folder)
    rewritten(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)})
    assert len(module_from_hf(module, folder)) == len(list(module.parameters()))
    module._keys_to_ignore_on_load_unexpected = [r"^extra\."]
    rewritten(folder, {"extra.head": torch.zeros(3)})
    assert "extra.head" not in module_from_hf(module, folder)
