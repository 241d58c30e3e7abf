"""Covers the files of the zoo: those of save_pretrained are read, and written back byte for byte."""

import pathlib
from typing import Any

import pytest
import torch

import shardfn as sf

transformers = pytest.importorskip("transformers")

from architectures import ZOO  # noqa: E402  # beside this file; needs transformers
from tiny_configs import tiny  # noqa: E402

DAILY = {"MixtralForCausalLM", "GraniteMoeForCausalLM", "NemotronHForCausalLM", "LlavaForConditionalGeneration"}
# transformers and shardfn write different ones of two tied names.
OTHER_TIES = {"JinaEmbeddingsV3ForMaskedLM", "LukeForMaskedLM"}
NAMES = [pytest.param(name, marks=[] if name in DAILY else pytest.mark.nightly) for name in ZOO]


@pytest.mark.day("GraniteMoeForCausalLM", "MixtralForCausalLM", "NemotronHForCausalLM")
@pytest.mark.parametrize("name", NAMES)
def test_files_of_the_zoo(name: str, tmp_path: pathlib.Path) -> None:
    kind: Any = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(tiny(kind.config_class, ZOO[name].config))
    model.save_pretrained(tmp_path / "theirs")
    read: dict[str, Any] = sf.interop.module_from_hf(model, tmp_path / "theirs")
    for path, p in model.named_parameters():
        assert torch.equal(read[path].full(), p), path
    sf.interop.module_to_hf(model, dict(model.named_parameters()), tmp_path / "ours")
    same = [path.read_bytes() == (tmp_path / "ours" / path.name).read_bytes() for path in _weights(tmp_path / "theirs")]
    assert all(same) == (name not in OTHER_TIES)


def _weights(directory: pathlib.Path) -> list[pathlib.Path]:
    return list(directory.glob("*.safetensors"))
