"""Trains a model that answers questions about images, by multi-modal causal attention and by plain causal attention.

    python examples/visual_chat.py
    torchrun --nproc-per-node 2 examples/visual_chat.py --steps 2000

Images are drawn: a shape in a colour. A chat shows one to four images in one to three rounds of two questions, such as
"colour second ?" or "same shape first third ?". A vision tower of transformers first learns to name single shapes, and
is then frozen. A projector and a small GPT learn the chats, once with each rule of attention, from the same weights,
rows and number of steps. A run that was interrupted goes on from its last checkpoint.

Needs transformers. Files in --out: report.md, report.json, chats.png where matplotlib is installed, a directory for
each rule, such as `separate`, and some images. Then, with the directory of the images:

    shardfn serve runs/visual_chat/separate --image-root runs/visual_chat/images

A chat's user sends images, each followed by its place, and a question: "<image> first <image> second colour second ?".
"""

import argparse
import functools
import importlib.util
import json
import pathlib
import random
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

import shardfn as sf
from shardfn import data
from shardfn.interop import llava_to_hf
from shardfn.models import gpt

SIZE, PATCH, WIDTH = 16, 8, 32
TOKENS = (SIZE // PATCH) ** 2  # of an image
COLOURS = {
    "red": (220, 40, 40),
    "green": (30, 170, 60),
    "blue": (40, 70, 220),
    "yellow": (230, 210, 40),
    "black": (0, 0, 0),
}
SHAPES = ("square", "circle", "cross", "stripe")
PLACES = ("first", "second", "third", "fourth")
WORDS = ("<pad>", "<image>", "<end>", "colour", "shape", "same", "?", "yes", "no", *PLACES, *COLOURS, *SHAPES)
IDS = {word: i for i, word in enumerate(WORDS)}
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }} "
    "{% endfor %}{% if message['role'] == 'assistant' %}<end> {% endif %}{% endfor %}"
)
UNSEEN = (100, 139)  # variants of drawings that training does not show


def main():
    args = arguments()
    torch.set_num_threads(1)
    mesh = sf.make_mesh({"dp": -1})
    torch.manual_seed(args.seed)  # the same tower on all ranks
    module, named = train_tower(args)
    tower, look = sf.from_module(module.requires_grad_(False).eval())
    rows, curves, models = [], {}, {}
    for rule in args.rules:
        config = make_config(args, rule)
        models[rule], curves[rule], seconds = train(config, tower, look, args, mesh)
        accuracies = measure(config, look, models[rule], args)
        rows.append({"rule": rule, "steps": args.steps, "loss": curves[rule][-1][1], **accuracies, "seconds": seconds})
    if mesh.rank == 0:
        report(rows, named, args)
        for rule in args.rules:
            save(args.out / rule, make_config(args, rule), module, models[rule])
        save_images(args.out / "images")
        if importlib.util.find_spec("matplotlib"):
            draw_chats(curves, look, models, args)
    if dist.is_initialized():
        dist.destroy_process_group()


def make_config(args, rule):
    return gpt.Config(
        vocab_size=len(WORDS),
        num_layers=args.layers,
        d_model=args.width,
        num_heads=4,
        max_len=64,
        norm="rms",
        position="rope",
        mlp="swiglu",
        bias=False,
        images=gpt.Images(IDS["<image>"], rule),
    )


# Images and chats.


@functools.cache
def draw_image(colour, shape, variant):
    """A shape of about half of the image on a light background with noise: float32 [3, size, size], -1.8 to 1.2."""
    draw = random.Random(f"{colour} {shape} {variant}")
    radius, (x, y) = draw.uniform(3.5, 5.5), (draw.uniform(6, 10), draw.uniform(6, 10))
    v, u = torch.meshgrid(torch.arange(SIZE) + 0.5 - y, torch.arange(SIZE) + 0.5 - x, indexing="ij")
    inside = {
        "square": torch.maximum(u.abs(), v.abs()) < radius * 0.9,
        "circle": u.square() + v.square() < radius**2,
        "cross": (torch.minimum(u.abs(), v.abs()) < 1.2) & (torch.maximum(u.abs(), v.abs()) < radius),
        "stripe": (v.abs() < 1.6) & (u.abs() < radius + 1),
    }[shape]
    noise = torch.Generator().manual_seed(draw.getrandbits(32))
    pixels = 235 + 8 * torch.randn(3, SIZE, SIZE, generator=noise)
    return torch.where(inside, torch.tensor(COLOURS[colour])[:, None, None], pixels) / 85 - 1.8


class Chats:
    """Chats by number: row i is always the same.

    Args:
        rounds: rounds of each chat.
        least: least images of a round.
        most: most images of a round.
        seed: other seeds have other rows.
        variants: first and last variant of the drawings.
    """

    def __init__(self, rounds, least, most, seed, variants=(0, 99)):
        self.rounds, self.least, self.most, self.seed, self.variants = rounds, least, most, seed, variants

    def __len__(self):
        return 1 << 20

    def __getitem__(self, i):
        draw = random.Random(f"{self.seed} {self.rounds} {self.least} {self.most} {i}")
        tokens, labels, images, seen = [], [], [], []
        for _ in range(self.rounds):
            for _ in range(draw.randint(self.least, self.most) if len(seen) < len(PLACES) else 0):
                if len(seen) < len(PLACES):
                    seen.append((draw.choice(list(COLOURS)), draw.choice(SHAPES)))
                    images.append(draw_image(*seen[-1], draw.randint(*self.variants)))
                    tokens += [IDS["<image>"], IDS[PLACES[len(seen) - 1]]]
            for _ in range(2):
                question, answer = ask(seen, draw)
                tokens += [IDS[word] for word in (*question, "?", answer, "<end>")]
                labels += [data.IGNORED] * (len(tokens) - len(labels) - 2) + [IDS[answer], IDS["<end>"]]
        return {"tokens": tokens, "labels": labels, "images": images}


def ask(seen, draw):
    """A question about all images so far, and its answer."""
    kind, one = draw.choice(("colour", "shape")), draw.randrange(len(seen))
    if len(seen) > 1 and draw.random() < 0.3:
        other = draw.choice([i for i in range(len(seen)) if i != one])
        part = kind == "shape"
        return ("same", kind, PLACES[one], PLACES[other]), "yes" if seen[one][part] == seen[other][part] else "no"
    return (kind, PLACES[one]), seen[one][kind == "shape"]


SOURCES = {"one image": (1, 1, 1), "several images": (1, 1, 4), "several rounds": (3, 1, 2)}
KINDS = {"one image": (1, 1, 1), "two images": (1, 2, 2), "several images": (1, 3, 4), "several rounds": (3, 1, 2)}
collate = data.pad_images((3, SIZE, SIZE), 64, image_token=IDS["<image>"], count=TOKENS)


def make_mixture(args):
    """The blend of the three kinds of chats."""
    sources = {name: Chats(*kind, args.seed) for name, kind in SOURCES.items()}
    return data.Mixture(sources, weights={"one image": 1, "several images": 2, "several rounds": 3}, seed=args.seed)


# The model.


def train_tower(args):
    """A small tower of transformers that names single images, and its accuracy."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    tower = CLIPVisionModel(CLIPVisionConfig(image_size=SIZE, patch_size=PATCH, **sizes))
    heads = torch.nn.Linear(WIDTH, len(COLOURS)), torch.nn.Linear(WIDTH, len(SHAPES))
    rule = torch.optim.AdamW([p for part in (tower, *heads) for p in part.parameters()], 3e-3)
    draw, right = random.Random(args.seed), []
    for _ in range(args.tower_steps):
        names = [(draw.randrange(len(COLOURS)), draw.randrange(len(SHAPES))) for _ in range(64)]
        pixels = torch.stack([draw_image(list(COLOURS)[c], SHAPES[s], draw.randrange(100)) for c, s in names])
        features = tower(pixel_values=pixels).last_hidden_state[:, 1:].mean(1)
        logits, wanted = [head(features) for head in heads], torch.tensor(names).unbind(1)
        rule.zero_grad()
        sum(F.cross_entropy(x, y) for x, y in zip(logits, wanted, strict=True)).backward()
        rule.step()
        right.append(
            torch.stack([x.argmax(-1) == y for x, y in zip(logits, wanted, strict=True)]).all(0).float().mean()
        )
    return tower, torch.stack(right[-10:]).mean().item()


def find_features(look, params, images):
    """Features of all image tokens, [N * TOKENS, D]: the tower's patches, and a projector of two layers."""
    patches = look(params["tower"], pixel_values=images).last_hidden_state[:, 1:]
    hidden = F.gelu(F.linear(patches, params["projector"]["up"]))
    return F.linear(hidden, params["projector"]["down"]).flatten(0, 1)


def make_batch(look, params, batch):
    targets = F.pad(batch["labels"][:, 1:], (0, 1), value=data.IGNORED)
    return {
        "tokens": batch["tokens"],
        "targets": targets,
        "image_features": find_features(look, params, batch["images"]),
    }


def loss_of(config, look, params, batch):
    return gpt.loss(config, params["gpt"], make_batch(look, params, batch))


def init(config, tower, seed):
    draw = torch.Generator().manual_seed(seed)
    D = config.d_model
    projector = {
        "up": torch.randn(D, WIDTH, generator=draw) * WIDTH**-0.5,
        "down": torch.randn(D, D, generator=draw) * D**-0.5,
    }
    return {"gpt": gpt.init(config, sf.key(seed)), "tower": tower, "projector": projector}


def train(config, tower, look, args, mesh):
    """Returns the parameters, the losses, and the seconds of the steps. Goes on from a run of these sizes in --out."""
    schedule = sf.optim.warmup_cosine_decay_schedule(0.0, args.lr, args.steps // 20 + 1, args.steps + 1, args.lr / 10)
    step = sf.sharded_step(
        functools.partial(loss_of, config, look),
        sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(schedule, weight_decay=0.01)),
        mesh=mesh,
        zero=sf.Zero(stage=3),
        trainable={"gpt": True, "tower": False, "projector": True},
    )
    state, mixture = step.init(init(config, tower, args.seed)), make_mixture(args)
    sizes = args.layers, args.width, args.batch, args.lr, args.steps, args.tower_steps, args.seed
    where = args.out / "checkpoints" / "-".join(map(str, (config.images.rule, *sizes)))
    checkpoints, done, curve, seconds = sf.checkpoint.Manager(where, mesh=mesh, save_every=args.log_every), 0, [], 0.0
    if checkpoints.steps():
        restored = checkpoints.restore(state)
        state, done, curve, seconds = restored.tree, restored.step, *restored.user
    start, each = time.monotonic() - seconds, args.batch // mesh.size
    with checkpoints:
        for n in range(done, args.steps):
            first = n * each * mesh.size + mesh.rank * each
            batch = collate([mixture[row] for row in range(first, first + each)])
            state, metrics = step(state, {name: batch[name] for name in ("tokens", "labels", "images")})
            if (n + 1) % args.log_every == 0 or n + 1 == args.steps:
                curve.append((n + 1, float(metrics["loss"])))
                seconds = time.monotonic() - start
                checkpoints.save(state, n + 1, user=[curve, seconds], now=n + 1 == args.steps)
                if mesh.rank == 0:
                    print(f"{config.images.rule}, step {n + 1}: loss {curve[-1][1]:.4f}, {seconds:.0f} s", flush=True)
    return sf.unshard(state.params), curve, seconds


@torch.no_grad()
def answer(config, look, params, batch):
    """The words at the places of answers, given all before them, [B, T]: the right token is never read."""
    features = find_features(look, params, batch["images"])
    logits = gpt.apply(config, params["gpt"], batch["tokens"], image_features=features)
    return F.pad(logits.argmax(-1)[:, :-1], (1, 0))


def measure(config, look, params, args):
    """The share of right answers by kind of chat, over chats that training has not seen."""
    found, compared = {}, []
    for name, kind in KINDS.items():
        chats, right = Chats(*kind, f"held out {args.seed}", UNSEEN), []
        for first in range(0, args.held_out, 64):
            batch = collate([chats[i] for i in range(first, min(first + 64, args.held_out))])
            asked = (batch["labels"] != data.IGNORED) & (batch["labels"] != IDS["<end>"])
            correct = answer(config, look, params, batch) == batch["labels"]
            right.append(correct[asked])
            compared.append(correct[asked & (batch["tokens"].roll(5, 1) == IDS["same"])])  # "same colour first third ?"
        found[name] = torch.cat(right).float().mean().item()
    return found | {"comparisons": torch.cat(compared).float().mean().item()}


# The files.


def save(directory, config, tower, params):
    """Writes a model with its tokenizer and image processor, which transformers knows as a LLaVA."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPImageProcessorPil, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(IDS, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "additional_special_tokens": ["<image>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, chat_template=TEMPLATE, **special)
    # Pixels from 0 to 255 become x / 85 - 1.8.
    size = {"height": SIZE, "width": SIZE}
    scale = {"image_mean": [0.6] * 3, "image_std": [1 / 3] * 3, "do_center_crop": False}
    processor = CLIPImageProcessorPil(size=size, **scale)
    llava_to_hf(
        directory, config, params["gpt"], tower, params["projector"], image_processor=processor, tokenizer=tokenizer
    )


def save_images(directory):
    """Writes some images that training has not shown, such as red-circle.png."""
    from PIL import Image

    directory.mkdir(exist_ok=True)
    for i, (colour, shape) in enumerate((c, s) for c in COLOURS for s in SHAPES):
        pixels = ((draw_image(colour, shape, UNSEEN[0] + i) + 1.8) * 85).clamp(0, 255).round().byte()
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(directory / f"{colour}-{shape}.png")


# The report.


def report(rows, named, args):
    kinds = [*KINDS, "comparisons"]
    lines = [
        f"The frozen tower names {named:.1%} of single shapes. Right answers in {args.held_out} unseen chats each, and",
        "of questions that compare two images in any of these chats:",
        "",
        "| rule of attention | steps | loss | " + " | ".join(kinds) + " | seconds |",
        "|---" * (4 + len(kinds)) + "|",
    ]
    for row in rows:
        shares = " | ".join(f"{row[name]:.1%}" for name in kinds)
        lines.append(f"| {row['rule']} | {row['steps']} | {row['loss']:.4f} | {shares} | {row['seconds']:.0f} |")
    text = "\n".join(lines) + "\n"
    print(text, end="")
    (args.out / "report.md").write_text(text, encoding="utf-8")
    (args.out / "report.json").write_text(
        json.dumps({"args": vars(args) | {"out": None}, "tower": named, "rows": rows})
    )


def draw_chats(curves, look, models, args):
    """Curves of the losses, and a chat of several rounds with the answers of both models."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    example = Chats(*SOURCES["several rounds"], "picture", UNSEEN)[args.seed]
    batch = collate([example])
    found = {rule: answer(make_config(args, rule), look, models[rule], batch)[0].tolist() for rule in models}
    words, labels, lines = batch["tokens"][0].tolist(), batch["labels"][0].tolist(), []
    start = 0
    for i, label in enumerate(labels):
        if label not in (data.IGNORED, IDS["<end>"]):
            asked = " ".join(WORDS[t] for t in words[start:i] if t != IDS["<image>"])
            answers = ", ".join(f"{rule}: {WORDS[found[rule][i]]}" for rule in models)
            lines.append(f"{asked}  {answers}")
            start = i + 2
    num = len(example["images"])
    figure, axes = pyplot.subplots(1, num + 1, figsize=(5 + 1.6 * num, 3.4), width_ratios=[3, *[1] * num])
    for rule, curve in curves.items():
        axes[0].plot(*zip(*curve, strict=True), label=rule)
    axes[0].set(xlabel="step", ylabel="loss of answers")
    axes[0].legend()
    for place, axis, image in zip(PLACES, axes[1:], example["images"], strict=False):
        axis.imshow(((image + 1.8) / 3).clamp(0, 1).permute(1, 2, 0))
        axis.set_title(place)
        axis.axis("off")
    figure.text(0.5, -0.02, "\n".join(lines), ha="center", va="top", family="monospace", fontsize=8)
    figure.savefig(args.out / "chats.png", dpi=150, bbox_inches="tight")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=pathlib.Path, default=pathlib.Path("runs/visual_chat"))
    add("--steps", type=int, default=800)
    add("--tower-steps", type=int, default=200)
    add("--rules", nargs="+", choices=("separate", "code", "causal"), default=["separate", "causal"])
    add("--batch", type=int, default=24, help="chats of a step, on all ranks together")
    add("--layers", type=int, default=2)
    add("--width", type=int, default=64)
    add("--lr", type=float, default=3e-3)
    add("--held-out", type=int, default=256, help="unseen chats of each kind")
    add("--log-every", type=int, default=100)
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
