"""Small tokenizers of each kind, trained here."""

import functools
import json
from typing import Any

import pytest

tokenizers: Any = pytest.importorskip("tokenizers")

TEXTS = [
    "the cat sat on the mat.",
    "naïve café — déjà vu",
    "  two  spaces\nand lines\n\n",
    "日本語 emoji 😀👩‍👩‍👧 done",
]
SPECIAL = ["<s>", "</s>", "<|user|>"]
METASPACE = "\u2581"


def _trained(kind: str) -> Any:
    t = tokenizers
    bpe = {"vocab_size": 320, "special_tokens": SPECIAL, "show_progress": False}
    if kind == "byte level":
        made = t.Tokenizer(t.models.BPE())
        made.pre_tokenizer, made.decoder = t.pre_tokenizers.ByteLevel(add_prefix_space=False), t.decoders.ByteLevel()
        trainer = t.trainers.BpeTrainer(**bpe, initial_alphabet=t.pre_tokenizers.ByteLevel.alphabet())
    elif kind in ("llama", "gemma"):
        made = t.Tokenizer(t.models.BPE(byte_fallback=True, unk_token="<s>"))
        made.normalizer = t.normalizers.Replace(" ", METASPACE)
        steps = [t.decoders.Replace(METASPACE, " "), t.decoders.ByteFallback(), t.decoders.Fuse()]
        made.decoder = t.decoders.Sequence(steps + [t.decoders.Strip(" ", 1, 0)] * (kind == "llama"))
        single = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = t.trainers.BpeTrainer(**(bpe | {"vocab_size": 300, "special_tokens": SPECIAL + single}))
    elif kind == "metaspace":
        made = t.Tokenizer(t.models.Unigram())
        made.pre_tokenizer, made.decoder = t.pre_tokenizers.Metaspace(), t.decoders.Metaspace()
        trainer = t.trainers.UnigramTrainer(
            vocab_size=90, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
        )
    elif kind == "word pieces":
        made = t.Tokenizer(t.models.WordPiece(unk_token="<s>"))
        made.pre_tokenizer, made.decoder = t.pre_tokenizers.BertPreTokenizer(), t.decoders.WordPiece()
        trainer = t.trainers.WordPieceTrainer(**bpe)
    elif kind == "suffixes":
        made = t.Tokenizer(t.models.BPE(end_of_word_suffix="</w>", unk_token="<s>"))
        made.pre_tokenizer, made.decoder = t.pre_tokenizers.WhitespaceSplit(), t.decoders.BPEDecoder()
        trainer = t.trainers.BpeTrainer(**bpe, end_of_word_suffix="</w>")
    else:
        made = t.Tokenizer(t.models.WordLevel(unk_token="<s>"))
        made.pre_tokenizer = t.pre_tokenizers.WhitespaceSplit()
        trainer = t.trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False)
    made.train_from_iterator(TEXTS * 3, trainer)
    if kind in ("llama", "gemma"):  # as those of SentencePiece: bytes are tokens like others
        state = json.loads(made.to_str())
        state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in SPECIAL]
        made = t.Tokenizer.from_str(json.dumps(state))
    made.add_tokens([t.AddedToken("added token", special=False), t.AddedToken("\u2581x", special=False)])
    return made


trained = functools.cache(_trained)
# Decoders that are followed byte by byte or token by token, and those that are asked for windows.
FOLLOWED = ["byte level", "llama", "gemma", "metaspace"]
ASKED = ["word pieces", "suffixes", "words"]
