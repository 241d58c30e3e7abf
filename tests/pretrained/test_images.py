"""Covers models of images and text of transformers: prompts, tokens and log probabilities of its own `generate`."""

import base64
import dataclasses
import functools
import io
import json
import pathlib
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardfn.core import make_mesh, tree_map
from shardfn.inference import Sampling
from shardfn.interop import gpt_from_hf, llava_to_hf
from shardfn.models import gpt
from shardfn.pretrained import LLM, load_image_encoder
from shardfn.testing import distributed

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

WORDS = ("<pad>", "<end>", "<image>", "<boi>", "<eoi>")
IMAGE, BOI, EOI = 2, 3, 4
VOCAB = 264
TEXT = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1},
}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}HOLDER{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}model\n"
)


def make_tokenizer(holder: str) -> Any:
    """A tokenizer of bytes, in which two line ends are one token."""
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    letters = sorted(byte_level.alphabet())
    vocab = {word: i for i, word in enumerate((*WORDS, *letters, "\u010a\u010a"))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("\u010a", "\u010a")]))
    made.pre_tokenizer = byte_level(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    special = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    names = {"pad_token": "<pad>", "eos_token": "<end>", "extra_special_tokens": special}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=TEMPLATE.replace("HOLDER", holder), **names
    )


def make_llava() -> tuple[Any, Any, Any, str]:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, "projection_dim": 16}
    text = {"model_type": "llama", **TEXT}
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE)
    sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    images, tokenizer = transformers.CLIPImageProcessorPil(**sizes), make_tokenizer("<image>")
    how = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = transformers.LlavaProcessor(images, tokenizer, **how)
    return transformers.LlavaForConditionalGeneration(config), images, processor, "<image>"


def make_gemma() -> tuple[Any, Any, Any, str]:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**TEXT, "head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8}
    text |= {"layer_types": ["sliding_attention", "full_attention"]}
    tokens = {"image_token_index": IMAGE, "boi_token_index": BOI, "eoi_token_index": EOI, "mm_tokens_per_image": 9}
    config = transformers.Gemma3Config(
        vision_config=vision | {"image_size": 24, "patch_size": 4}, text_config=text, **tokens
    )
    images = transformers.Gemma3ImageProcessorPil(size={"height": 24, "width": 24})
    processor = transformers.Gemma3Processor(images, make_tokenizer("<boi>"), image_seq_length=9)
    return transformers.Gemma3ForConditionalGeneration(config), images, processor, "<boi>"


def make_qwen() -> tuple[Any, Any, Any, str]:
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    tokens = {"image_token_id": IMAGE, "video_token_id": 0, "vision_start_token_id": BOI, "vision_end_token_id": EOI}
    config = transformers.Qwen2VLConfig(vision_config=vision, text_config={**TEXT, "rope_parameters": rope}, **tokens)
    size = {"shortest_edge": 8 * 8, "longest_edge": 32 * 32}
    images = transformers.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size)
    return transformers.Qwen2VLForConditionalGeneration(config), images, None, "<boi><image><eoi>"


MAKERS = {"llava": make_llava, "gemma3": make_gemma, "qwen2_vl": make_qwen}


@functools.cache
def make_model(kind: str, place: str) -> tuple[Any, Any, Any]:
    """The model, its processor of images and of prompts; also as a directory."""
    torch.manual_seed(0)
    model, images, processor, holder = MAKERS[kind]()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(1 if "norm" in name else 4)
    tokenizer = make_tokenizer(holder)
    for one in (model.eval(), images, tokenizer):
        one.save_pretrained(place)
    return model, images, processor


def draw_image(seed: int) -> Any:
    draw = torch.Generator().manual_seed(seed)
    h, w = torch.randint(12, 40, (2,), generator=draw).tolist()
    return Image.fromarray(torch.randint(256, (h, w, 3), generator=draw, dtype=torch.uint8).numpy())


def show(seed: int) -> dict[str, Any]:
    file = io.BytesIO()
    draw_image(seed).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def say(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


CHATS: list[tuple[list[int], list[Any]]] = [
    ([1], [{"role": "user", "content": [show(1), say("what?")]}]),
    (
        [1, 2, 3],
        [
            {"role": "user", "content": [show(1), say("what?\n"), show(2)]},
            {"role": "assistant", "content": "a cat"},
            {"role": "user", "content": [say("and "), show(3)]},
        ],
    ),
    ([], [{"role": "user", "content": "no image here"}]),
    ([4], [{"role": "user", "content": [say("a long text before the image " * 3), show(4)]}]),
]


def make_inputs(kind: str, place: str, chat: Any, seeds: list[int]) -> dict[str, Tensor]:
    """The inputs of `generate`, by transformers' own processors."""
    _, images, processor = make_model(kind, place)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    shown = [
        {**m, "content": [p if p["type"] == "text" else {"type": "image"} for p in m["content"]]}
        if isinstance(m["content"], list)
        else m
        for m in chat
    ]
    text = tokenizer.apply_chat_template(shown, tokenize=False)
    drawn = [draw_image(seed) for seed in seeds]
    if processor is not None:
        given = {"images": [drawn] if kind == "gemma3" else drawn} if drawn else {}
        return dict(processor(text=[text], return_tensors="pt", add_special_tokens=False, **given))
    made = dict(images(images=drawn, return_tensors="pt")) if drawn else {}
    for grid in made.get("image_grid_thw", ()):
        text = text.replace("<boi><image><eoi>", "<boi>" + "\0" * int(grid.prod() // 4) + "<eoi>", 1)
    ids = torch.tensor([tokenizer(text.replace("\0", "<image>"), add_special_tokens=False)["input_ids"]])
    more = {"mm_token_type_ids": (ids == IMAGE).int()} if drawn else {}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **made, **more}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", MAKERS)
def test_chats_are_those_of_transformers(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Prompts, tokens and log probabilities, beside one another, in chunks, and from the cache of prefixes."""
    place = str(tmp_path_factory.getbasetemp() / kind)
    model, *_ = make_model(kind, place)
    llm = LLM(place, cache_gib=0.02, buckets=(1, 4, 24), running=4, block=4)
    how = Sampling(max_tokens=10, temperature=0.0)
    for again in (False, True):
        answers = llm.chat([chat for _, chat in CHATS], how)
        for (seeds, chat), found in zip(CHATS, answers, strict=True):
            inputs = make_inputs(kind, place, chat, seeds)
            num = inputs["input_ids"].shape[1]
            wanted = model.generate(
                **{name: x for name, x in inputs.items() if name != "num_crops"},
                **{"max_new_tokens": 10, "do_sample": False, "output_logits": True, "return_dict_in_generate": True},
            )
            want = wanted.sequences[0, num:].tolist()
            assert found.tokens == want, (kind, seeds, again)
            rows = torch.cat(wanted.logits).log_softmax(-1)
            torch.testing.assert_close(torch.tensor(found.logprobs), rows[range(len(want)), want], rtol=1e-5, atol=2e-5)
    assert llm._reader is not None and llm._reader.num_encoded == 4
    assert llm.engine.stats.cache.hits > 100


@pytest.mark.nightly
@pytest.mark.parametrize("kind", MAKERS)
@distributed(world=2)
def test_two_ranks_have_the_bits_of_one(kind: str) -> None:
    """Two ranks cut the heads of a model, and each rank reads its parts of the files."""
    how, mesh = Sampling(max_tokens=6, temperature=0.0), make_mesh({"tp": 2})
    with tempfile.TemporaryDirectory() as own:
        places = [own]  # transformers writes weights only on the first rank
        dist.broadcast_object_list(places)
        [place] = places
        make_model.__wrapped__(kind, place)
        dist.barrier()
        sizes: dict[str, Any] = {"cache_gib": 0.02, "buckets": (1, 4, 24), "running": 4}
        chats = [chat for _, chat in CHATS]
        assert LLM(place, mesh=mesh, **sizes).chat(chats, how) == LLM(place, **sizes).chat(chats, how)
        dist.barrier()


@pytest.mark.nightly
def test_a_directory_of_our_own_model_is_a_llava(tmp_path: pathlib.Path) -> None:
    """With the rule "causal" the written directory has the answers of transformers, and with others another answer."""
    place = str(tmp_path / "one")
    model, images, _ = make_model("llava", str(tmp_path / "base"))
    config, params = gpt_from_hf(tmp_path / "base")
    assert config.images is not None and (config.images.token, config.images.rule) == (IMAGE, "causal")
    draw = torch.Generator().manual_seed(3)
    projector = {"up": torch.randn(32, 16, generator=draw), "down": torch.randn(32, 32, generator=draw) / 4}
    tower = model.model.vision_tower
    params = tree_map(lambda x: x.full(), params)
    tokens: dict[str, list[int]] = {}
    for rule in ("causal", "separate"):
        own = dataclasses.replace(config, images=gpt.Images(IMAGE, rule))
        tokenizer = make_tokenizer("<image>")
        llava_to_hf(place, own, params, tower, projector, image_processor=images, tokenizer=tokenizer)
        [found] = LLM(place, cache_gib=0.01).chat(CHATS[1][1], Sampling(max_tokens=8, temperature=0.0))
        tokens[rule] = found.tokens
    assert tokens["causal"] != tokens["separate"]
    llava_to_hf(place, config, params, tower, projector, image_processor=images, tokenizer=tokenizer)
    theirs = transformers.LlavaForConditionalGeneration.from_pretrained(place)
    inputs = make_inputs("llava", str(tmp_path / "base"), CHATS[1][1], CHATS[1][0])
    want = theirs.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokens["causal"] == want.tolist()
    with pytest.raises(ValueError, match=r"projector\['up'\] must be \(32, 16\), the tower's width is 16"):
        llava_to_hf(place, config, params, tower, {"up": torch.zeros(32, 8), "down": torch.zeros(32, 32)})
    settings = json.loads(pathlib.Path(place, "config.json").read_text())
    pathlib.Path(place, "config.json").write_text(json.dumps(settings | {"shardfn_images": "sideways"}))
    with pytest.raises(ValueError, match="shardfn_images must be one of 'separate', 'code', 'causal', got 'sideways'"):
        LLM(place)


@pytest.mark.nightly
def test_mistakes(tmp_path: pathlib.Path) -> None:
    place = str(tmp_path / "qwen")
    make_model("qwen2_vl", place)
    llm = LLM(place, cache_gib=0.01, image_root=str(tmp_path))
    with pytest.raises(ValueError, match="once for each image, got 1 of them and 0 images"):
        llm.chat([{"role": "user", "content": "<image>"}])
    with pytest.raises(ValueError, match=r"messages\[0\].content\[0\].image_url.url: .*below the directory"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}])
    with pytest.raises(ValueError, match="image_grids must have the rows and columns of each image, 4 tokens"):
        llm.engine.generate([[IMAGE] * 4], image_features=[torch.zeros(4, 32)])
    with pytest.raises(ValueError, match="image 0 of 2 x 2 tokens must have its tokens one after another"):
        llm.engine.generate([[IMAGE, 9, *[IMAGE] * 3]], image_features=[torch.zeros(4, 32)], image_grids=[[(2, 2)]])
    assert load_image_encoder(tmp_path, None) is None
    gemma = str(tmp_path / "gemma")
    make_model("gemma3", gemma)
    small = LLM(gemma, cache_gib=0.01, buckets=(4, 8), running=2)
    with pytest.raises(ValueError, match=r"images of at most 6 tokens, the rows of a step .* got 9"):
        small.chat(CHATS[0][1])
    whole = LLM(gemma, cache_gib=0.01)
    with pytest.raises(ValueError, match="prompt_logprobs must be False for a prompt with images"):
        whole.chat(CHATS[0][1], Sampling(max_tokens=1, prompt_logprobs=True))
