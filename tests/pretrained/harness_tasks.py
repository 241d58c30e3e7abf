"""Tasks of our own for lm-evaluation-harness, and a tiny Llama of Hugging Face's files, made of a text."""

import json
import pathlib
import random
from typing import Any

TASKS = {
    "own_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "own_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "own_generate": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n", "  "], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def write_tasks(folder: pathlib.Path, words: list[str], num: int, long: int) -> None:
    """Writes the three tasks with `num` documents each.

    Args:
        folder: directory for the files.
        words: words of the documents.
        num: documents of a task.
        long: words of a question. A text to be scored whole has four times as many.
    """
    draw = random.Random(0)

    def say(count: int) -> str:
        at = draw.randrange(len(words) - count)
        return " ".join(words[at : at + count])

    def sized(count: int) -> int:
        return draw.randint(max(1, count // 2), count)

    docs: dict[str, list[dict[str, Any]]] = {
        "own_choice": [
            {"question": say(sized(long)), "choices": [say(sized(5)) for _ in range(4)], "answer": draw.randrange(4)}
            for _ in range(num)
        ],
        "own_rolling": [{"text": say(sized(4 * long))} for _ in range(num)],
        "own_generate": [{"question": say(sized(long)), "answer": say(2)} for _ in range(num)],
    }
    for name, rows in docs.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"test": str(folder / f"{name}.jsonl")}
        about = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": data}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps({**about, **TASKS[name], "num_fewshot": 0}))


def write_model(folder: pathlib.Path, texts: list[str], vocab: int = 300, **sizes: Any) -> None:
    """Writes a Llama with random weights, and a tokenizer of bytes and pairs of the texts."""
    import tokenizers
    import transformers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    how: Any = {"vocab_size": vocab, "special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    made.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(**how))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    fast.pad_token = "</s>"
    fast.save_pretrained(folder)
    transformers.set_seed(4)
    more: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    more |= {"initializer_range": 0.2} | sizes
    config = transformers.LlamaConfig(bos_token_id=0, eos_token_id=1, pad_token_id=1, vocab_size=len(fast), **more)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
