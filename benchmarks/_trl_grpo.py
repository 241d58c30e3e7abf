"""TRL's GRPO for bench_rl.py, in an interpreter that has TRL: prints the seconds of each iteration as JSON.

It needs no internet: the model has random weights, and its tokenizer knows the words "0", "1", ...
"""

import json
import sys
import tempfile
import time

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def main(size):
    torch.set_num_threads(size["threads"])
    torch.manual_seed(0)
    trainer = GRPOTrainer(
        model=LlamaForCausalLM(_config(size)),
        reward_funcs=reward,
        args=_arguments(size),
        train_dataset=Dataset.from_list(_prompts(size)),
        processing_class=_tokenizer(size),
    )
    clock = Clock()
    trainer.add_callback(clock)
    generate = trainer._generate

    def timed(*args, **kwargs):
        start = time.perf_counter()
        found = generate(*args, **kwargs)
        clock.generation = time.perf_counter() - start
        clock.tokens = sum(map(len, found[1]))
        return found

    trainer._generate = timed
    trainer.train()
    print(json.dumps(clock.iterations))


class Clock(TrainerCallback):
    """The seconds of each iteration, of its generation, and its tokens."""

    def __init__(self):
        self.iterations, self.generation, self.tokens = [], 0.0, 0
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.iterations.append({"all": now - self.start, "generation": self.generation, "tokens": self.tokens})
        self.start = now


def reward(completion_ids, **kwargs):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def _config(size):
    return LlamaConfig(
        vocab_size=size["vocab"],
        hidden_size=size["width"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["heads"],
        intermediate_size=size["ffn"],
        max_position_embeddings=size["prompt"] + size["answer"],
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )


def _arguments(size):
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=size["prompts"] * size["n"],
        num_generations=size["n"],
        max_completion_length=size["answer"],
        generation_kwargs={"min_new_tokens": size["answer"]},  # all answers are of one length
        max_steps=size["iterations"],
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon_high=0.28,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
    )


def _prompts(size):
    draw = torch.Generator().manual_seed(0)
    shape = size["prompts"] * size["iterations"], size["prompt"]
    return [
        {"prompt": " ".join(map(str, row))} for row in torch.randint(2, size["vocab"], shape, generator=draw).tolist()
    ]


def _tokenizer(size):
    words = Tokenizer(models.WordLevel({str(i): i for i in range(size["vocab"])}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", eos_token="1", pad_token="1")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
