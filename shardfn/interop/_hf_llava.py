"""Directories of LLaVA: a tower, a projector and a language model, where the language model is a `models.gpt`.

`shardfn_images` of the `config.json` is the rule by which images are read, which transformers ignores: "causal".

D model, W width of the tower.
"""

import dataclasses
import json
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardfn import core
from shardfn.models import gpt

from ._hf_config import IMAGES_RULE
from ._hf_gpt import gpt_to_hf


def llava_to_hf(
    directory: str | os.PathLike[str],
    config: gpt.Config,
    params: gpt.Params,
    tower: nn.Module,
    projector: Mapping[str, Tensor],
    *,
    image_processor: Any = None,
    tokenizer: Any = None,
) -> None:
    """Writes a model of images and text as a directory of LLaVA, which transformers, `shardfn serve` and `LLM` load.

    An image's features are `down gelu(up x)` of the tower's last states x, without the state of the class. With the
    rule "causal" the logits of transformers are equal, except the image token's. transformers ignores other rules.

    Args:
        directory: directory for the files.
        config: config of the language model, with `images`.
        params: parameters as of `gpt.init(config, key)`, on a single rank.
        tower: CLIP or SigLIP vision model of transformers.
        projector: "up" [D, W] and "down" [D, D].
        image_processor: image processor of transformers, or None.
        tokenizer: tokenizer of transformers, or None.

    Raises:
        ValueError: the config has no images, or the projector does not take the tower's width, or transformers has no
            such language model.
    """
    import transformers

    if config.images is None:
        raise ValueError("llava_to_hf: config.images must be a rule of images, got None. Give Config(images=).")
    D, vision = config.d_model, tower.config
    W: Any = vision.hidden_size  # pyright: ignore
    problems = [
        f"projector[{name!r}] must be {want}, the tower's width is {W} and the model's {D}, got {tuple(x.shape)}"
        for name, want in (("up", (D, W)), ("down", (D, D)))
        if (x := projector[name]).shape != want
    ]
    core.raise_all(ValueError, "llava_to_hf: the projector does not fit. Give it other sizes:", problems)
    with tempfile.TemporaryDirectory() as place:
        gpt_to_hf(place, dataclasses.replace(config, images=None), params)
        language = transformers.AutoModelForCausalLM.from_pretrained(place)
    settings: dict[str, Any] = {"vision_config": vision, "text_config": language.config}
    settings |= {"image_token_id": config.images.token, "tie_word_embeddings": config.tie_embeddings}
    settings |= {"projector_hidden_act": "gelu", "multimodal_projector_bias": False}
    settings |= {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
    made = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(**settings))
    made.model.language_model.load_state_dict(language.model.state_dict())
    made.lm_head.load_state_dict(language.lm_head.state_dict())
    made.model.vision_tower.load_state_dict(tower.state_dict())
    made.model.multi_modal_projector.linear_1.load_state_dict({"weight": projector["up"]})
    made.model.multi_modal_projector.linear_2.load_state_dict({"weight": projector["down"]})
    made.save_pretrained(directory)
    for beside in (image_processor, tokenizer):
        if beside is not None:
            beside.save_pretrained(directory)
    path = pathlib.Path(directory) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {IMAGES_RULE: config.images.rule}, indent=2) + "\n")
