"""Covers `speculators/_files.py`: what is written is read, and other files are refused by name."""

import json
import pathlib
from typing import Any

import pytest
import torch

from shardfn import core
from shardfn.collectives import GlobalTensor
from shardfn.core import P, make_mesh, tree_map
from shardfn.inference import Decoder, decoder
from shardfn.kernels import quantize_blocks
from shardfn.models import gpt
from shardfn.speculators import RecurrentConfig, config_of, init, load, save

SIZES: dict[str, Any] = {"vocab_size": 13, "num_layers": 2, "d_model": 24, "num_heads": 4}


def model(**changes: Any) -> tuple[Decoder, Any]:
    config = gpt.Config(**SIZES | changes)
    return decoder(config), gpt.init(config, core.key(7))


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> pathlib.Path:
    config = config_of(model()[0], "lstm", d_inner=8)
    save(tmp_path / "made", config, init(config, core.key(0)), *model())
    return tmp_path / "made"


def test_files_are_read_as_written(directory: pathlib.Path) -> None:
    config = RecurrentConfig("lstm", vocab_size=13, d_model=24, num_layers=2, d_inner=8)
    found = load(directory, *model(batch_invariant=True))
    assert found.config == config
    other = load(directory, *model())
    assert found.digest() == other.digest()
    save(directory, config, init(config, core.key(1)), *model())  # in place of the files there
    assert load(directory, *model()).digest() != found.digest()
    assert sorted(x.name for x in directory.iterdir()) == ["config.json", "model.safetensors"]


def test_a_model_of_another_config_is_refused(directory: pathlib.Path) -> None:
    with pytest.raises(
        ValueError, match=r"made: drafter: a speculator of another model(?s:.*)vocab_size is 13, and .*12"
    ):
        load(directory, *model(vocab_size=12))
    with pytest.raises(ValueError, match=r"its model has the digest [0-9a-f]{16}, and this model [0-9a-f]{16}"):
        load(directory, *model(position="rope"))
    config = config_of(model()[0], "mlp")
    with pytest.raises(
        ValueError, match=r"save: a speculator of another model(?s:.*)d_model is 24, and the model has 32"
    ):
        save(directory, config, init(config, core.key(0)), *model(d_model=32))


def test_a_model_of_other_weights_is_refused(directory: pathlib.Path) -> None:
    one, params = model()
    further = tree_map(lambda x: x.clone(), params)
    further["blocks"][1]["w_up"] += 0.01
    del further["position"]
    with pytest.raises(ValueError, match=r"made: a speculator of other weights. Train one") as found:
        load(directory, one, further)
    lines = [line.strip(" -") for line in str(found.value).splitlines()[1:]]
    assert [line.split(" ")[0] for line in lines] == ["['blocks'][1]['w_up']", "['position']"]
    assert "has the digest" in lines[0] and "is missing" in lines[1]
    assert load(directory, one, None).config.d_inner == 8  # only the config


def test_digests_do_not_depend_on_the_form_of_weights(directory: pathlib.Path) -> None:
    one, params = model()
    load(directory, one, tree_map(lambda x: x.bfloat16(), params))
    mesh = make_mesh({}, alone=True)
    load(directory, one, tree_map(lambda x: GlobalTensor(x, x.shape, P(), mesh), params))
    for changes in ({"stacked": True}, {"per_head": True}):
        load(directory, *model(**changes))
    with core.deferred():
        load(directory, *model())
    codes = params | {"head": quantize_blocks(torch.zeros(13, 32), "int8")}  # codes are not compared with floats
    load(directory, one, codes)


def test_damaged_files_are_refused_by_name(directory: pathlib.Path) -> None:
    config, tensors = directory / "config.json", directory / "model.safetensors"
    about, data = json.loads(config.read_text()), tensors.read_bytes()
    for changed, message in (
        ({**about, "format": "gguf"}, r"config.json has the format 'gguf', and must have 'shardfn-speculator'"),
        ({**about, "widht": 3}, r"widht is unknown"),
        ({k: v for k, v in about.items() if k != "d_inner"}, r"d_inner is missing"),
        ({**about, "model_weights": {"embed": 3}}, r"must have a size and a digest for each leaf, got {'embed': 3}"),
        ({**about, "kind": "gru"}, r"kind must be one of mlp, lstm, owl, eagle3, mtp, got 'gru'"),
        ({**about, "d_inner": 9}, r"first is \(32, 24\), and must be \(36, 24\)"),
    ):
        config.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            load(directory, *model())
    config.write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        load(directory, *model())
    config.write_text(json.dumps(about))
    tensors.write_bytes(data[:-5])
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read"):
        load(directory, *model())
    tensors.unlink()
    with pytest.raises(FileNotFoundError, match=r"made has no model.safetensors"):
        load(directory, *model())
