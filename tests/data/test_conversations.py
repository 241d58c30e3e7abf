"""Covers shardfn/data/_collate.py: only the turns of the assistant are learnt."""

from typing import Any

import pytest

from shardfn.data import IGNORED, encode_answers, encode_chat

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

SYSTEM, ASK, YES, MORE, NO = (
    {"role": role, "content": text}
    for role, text in (("system", "be"), ("user", "hi"), ("assistant", "yes"), ("user", "so"), ("assistant", "no"))
)
CALL = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
RESULT = {"role": "tool", "content": "3"}
HEAD = "{% if tools %}<{{ tools | length }} tools>{% endif %}{% for m in messages %}<{{ m.role }}>"
BODY = "{% if m.tool_calls %}call {{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}"
TAIL = "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
THINK = "{% if m.role == 'assistant' and loop.last %}(think){% endif %}"  # as templates that drop earlier thoughts
END = "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
PLAIN = HEAD + BODY + END + TAIL
MARKED = HEAD + "{% if m.role == 'assistant' %}{%- generation -%}" + BODY + "{{ eos_token }}{% endgeneration %}"
MARKED += "{% else %}" + BODY + "{% endif %}" + TAIL


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner: Any = Tokenizer(models.BPE({"$": 0} | {x: i for i, x in enumerate(letters, 1) if x != "$"}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="$")


def shown(tokenizer: Any, made: dict[str, list[int]]) -> str:
    """The text with a dot for each token that is not learnt."""
    return "".join(
        "." if y == IGNORED else tokenizer.decode([x]) for x, y in zip(made["tokens"], made["labels"], strict=True)
    )


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["prefixes", "masks"])
def test_answers_only_are_learnt(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    made = encode_chat(tokenizer, [SYSTEM, ASK, YES, MORE, NO])
    text = "<system>be<user>hi<assistant>yes$<user>so<assistant>no$"
    assert tokenizer.decode(made["tokens"]) == text
    dots = ["." * len(part) for part in ("<system>be<user>hi<assistant>", "<user>so<assistant>")]
    assert shown(tokenizer, made) == f"{dots[0]}yes${dots[1]}no$"
    last = encode_chat(tokenizer, [SYSTEM, ASK, YES, MORE, NO], start=3)
    assert last["tokens"] == made["tokens"] and shown(tokenizer, last).strip(".") == "no$"
    every = encode_chat(tokenizer, [SYSTEM, ASK, YES, MORE, NO], learn="everything")
    assert every["labels"] == every["tokens"] == made["tokens"]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["prefixes", "masks"])
def test_calls_of_tools_are_learnt_and_their_results_are_not(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    made = encode_chat(tokenizer, [ASK, CALL, RESULT, YES], tools=[{"type": "function"}])
    assert tokenizer.decode(made["tokens"]).startswith("<1 tools><user>hi")
    assert [x for x in shown(tokenizer, made).split(".") if x] == ["call add$", "yes$"]


def test_the_prompt_of_a_learnt_answer_is_the_one_of_its_use(tokenizer: Any) -> None:
    tokenizer.chat_template = PLAIN
    made = encode_chat(tokenizer, [ASK, YES])
    prompt = tokenizer.apply_chat_template([ASK], add_generation_prompt=True, return_dict=False)
    first = next(i for i, y in enumerate(made["labels"]) if y != IGNORED)
    assert made["tokens"][:first] == list(prompt)


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        # As templates that drop the thoughts of earlier turns.
        (PLAIN.replace("{% for", "{{ messages | length }}{% for"), [ASK, YES], "after the tokens that begin an answer"),
        (
            PLAIN.replace(BODY, THINK + BODY),
            [ASK, YES, MORE, NO],
            "messages 0 to 1 in another way when more messages follow",
        ),
        (PLAIN, [YES], "must begin with a message of the user or the system"),
        (PLAIN, [ASK], r"expected a message with role 'assistant', .*, got the roles \['user'\]"),
        (MARKED.replace("'assistant'", "'nobody'"), [ASK, YES], "marks no token of the answers"),
        ("{{ raise_exception('odd roles') }}", [ASK, YES], "the chat template refuses these messages: .*odd roles"),
        (None, [ASK, YES], "the tokenizer has no chat template, which rows of messages need"),
    ],
    ids=["length", "thoughts", "begins", "no-answer", "no-mask", "refused", "none"],
)
def test_answers_that_cannot_be_found_are_an_error(tokenizer: Any, template: str, messages: Any, words: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=words):
        encode_chat(tokenizer, messages)


def test_the_remedy_for_dropped_thoughts_works(tokenizer: Any) -> None:
    tokenizer.chat_template = PLAIN.replace(BODY, THINK + BODY)
    with pytest.raises(ValueError, match=r"Write a row for each answer, {'prompt': "):
        encode_chat(tokenizer, [ASK, YES, MORE, NO])
    made = encode_chat(tokenizer, [ASK, YES, MORE, NO], start=3)
    assert shown(tokenizer, made).strip(".") == "(think)no$"


def test_other_options_are_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = PLAIN
    with pytest.raises(ValueError, match="learn must be one of 'answers', 'everything', got 'all'"):
        encode_chat(tokenizer, [ASK, YES], learn="all")


def test_tokens_of_another_library_have_labels_too() -> None:
    def render(messages: Any, reply: bool) -> list[int]:
        return [ord(x) for m in messages for x in f"{m['role'][0]}:{m['content']};"] + [ord(x) for x in "a:" * reply]

    made = encode_answers(render, [ASK, YES, MORE, NO])
    assert "".join("." if y == IGNORED else chr(y) for y in made["labels"]) == ".......yes;.......no;"
