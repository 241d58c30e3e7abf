"""However requests are batched, cached, preempted or sharded: tokens are those of one forward, bit for bit."""

import functools
import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from shardfn import nn
from shardfn.inference import Limits, Runner
from shardfn.models.gpt import Images, Latent, Swift
from shardfn.models.moe import Experts
from shardfn.nn import moe
from tests.inference.stories import Story, check, model, run, stories

LIMITS = Limits(vocab=13, context=28, blocks=40, block=4, buckets=(3, 12), running=5)
LLAMA = {"norm": "rms", "mlp": "swiglu", "position": "rope", "bias": False, "num_kv_heads": 2}
KINDS: dict[str, tuple[dict[str, Any], Limits]] = {
    "gpt2": ({"tie_embeddings": True}, LIMITS),
    "llama": (LLAMA, replace(LIMITS, block=3, buckets=(2, 7), running=4)),
    "bloom": ({"position": "alibi", "embedding_norm": True}, replace(LIMITS, block=16, blocks=9, buckets=(16,))),
    "mistral": (LLAMA | {"window": 5}, LIMITS),
    "mixtral": (LLAMA | {"experts": Experts(num=5, d_ff=20)}, LIMITS),
    "gemma3": (
        {
            **LLAMA,
            **{"qk_norm": "head", "norm_place": "both", "norm_plus_one": True, "mlp": "geglu", "d_head": 10},
            **{"embedding_scale": 5.0, "attention_scale": 0.2, "softcap": 1.5, "logits_softcap": 90.0},
            **{"window": (5, None), "rope": (nn.Rope(50.0), nn.Rope(900.0, scaling=nn.LinearScaling(4.0)))},
        },
        replace(LIMITS, block=3, buckets=(2, 7), running=4),
    ),
    "olmo2": (LLAMA | {"qk_norm": "joint", "norm_place": "after", "rope": (nn.Rope(), None)}, LIMITS),
    "phi": (
        {
            **{"position": "rope", "rope": nn.Rope(fraction=0.5), "parallel": "one_norm", "head_bias": True},
            **{"d_head": 8, "sinks": True},
        },
        LIMITS,
    ),
    "qwen3_moe": (
        LLAMA | {"experts": Experts(num=16, top_k=8, d_ff=9)},
        replace(LIMITS, block=3, buckets=(2, 7), running=4),
    ),
    "images": (LLAMA | {"images": Images(7)}, LIMITS),
    "images_code": ({"images": Images(7, "code"), "window": 6}, replace(LIMITS, block=3, buckets=(2, 7), running=4)),
    "images_causal": ({"images": Images(7, "causal")}, LIMITS),
    "latent": (
        {name: x for name, x in LLAMA.items() if name != "num_kv_heads"} | {"latent": Latent(12, 6, 4, 5, q_rank=10)},
        replace(LIMITS, block=3, buckets=(2, 7), running=4),
    ),
    "deepseek": (
        {
            **{name: x for name, x in LLAMA.items() if name != "num_kv_heads"},
            **{"latent": Latent(9, 5, 6, 7, interleaved=True), "window": (None, 5)},
            "experts": Experts(
                num=6,
                d_ff=9,
                first=1,
                route=functools.partial(moe.sigmoid_groups, groups=3, groups_kept=2, scale=2.5),
                shared=True,
                shared_d_ff=12,
            ),
        },
        LIMITS,
    ),
    "gpt_oss": (
        {
            **{**LLAMA, "bias": True, "sinks": True, "window": (5, None), "d_head": 8},
            "rope": nn.Rope(scaling=nn.YarnScaling(4.0, 16, truncate=False)),
            "experts": Experts(
                num=5, d_ff=12, route=functools.partial(moe.top_k, softmax="after"), gate=moe.ClampedGate(), biases=True
            ),
        },
        LIMITS,
    ),
    "swift": (LLAMA | {"num_layers": 5, "swift": Swift(first=1, group=2)}, LIMITS),
}
_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
_QUICK = settings(derandomize=True, deadline=None, database=None, suppress_health_check=[*_SLOW])
# By night all kinds have this number of stories each.
MANY = int(os.environ.get("SHARDFN_STORIES", "500"))


@functools.cache
def runner(kind: str) -> Runner:
    """The graphs of a kind, captured once."""
    changes, limits = KINDS[kind]
    return Runner(model(**changes).decoder, limits)


def tell(kind: str, number: int) -> None:
    """Runs a number of stories of a kind."""
    changes, limits = KINDS[kind]

    @settings(_QUICK, max_examples=number)
    @given(stories(limits, find_image(changes)))
    def story(story: Story) -> None:
        told, _ = run(story, model(**changes), runner(kind), limits)
        check(story, told, model(**changes))

    story()


def find_image(changes: dict[str, Any]) -> int | None:
    """The image token of a kind of model."""
    return changes["images"].token if "images" in changes else None


def drawn_stories(limits: Limits, number: int, changes: dict[str, Any] | None = None) -> list[Story]:
    """The same stories on all ranks, which must not shrink them each by itself."""
    found: list[Story] = []

    @settings(_QUICK, max_examples=number, phases=[Phase.generate])
    @given(stories(limits, find_image(changes or {})))
    def draw(story: Story) -> None:
        found.append(story)

    draw()
    return found


def test_stories() -> None:
    tell("gpt2", 25)


def test_stories_of_images() -> None:
    tell("images", 5)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", list(KINDS))
def test_many_stories(kind: str) -> None:
    tell(kind, MANY)
