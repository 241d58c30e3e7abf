"""From the body of a request to requests of the engine."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from shardfn.inference import (
    BeamSearch,
    Grammar,
    Limits,
    ReasoningBudget,
    Request,
    Sampling,
    check_embedded,
    check_names,
    check_request,
    encode_sampling,
)

from ._beams import read_beams
from ._errors import ApiError
from ._fields import CHAT, COMPLETIONS, FORMAT, NUMBER, OPTIONS, SAMPLING, SCHEMA, get_required, read_fields
from ._message_formats import AnswerGrammar, ReasoningFormat
from ._message_parser import MessageParser
from ._model import Model, adapter_of
from ._prompts import read_chat, read_prompt_embeds, read_prompts
from ._request_tracker import MakeEvent
from ._tools import Tools, check_schemas, read_tools

_COMPLETION = 16  # OpenAI's default for max_tokens of the older route
_OLDER_TOP = 5  # its most probable tokens
_PROMPTS = (
    "messages input prompt prompt_embeds text_1 text_2 query queries documents choices".split()
)  # fields with prompts
_SEED_BITS = 53  # of a seed that the server draws: the integers that each reader of JSON keeps exactly


class MessageRules(NamedTuple):
    """Rules of the way from a choice's text to a message.

    Attributes:
        tools: tools that the answer may call, or None.
        reasoning: format of reasoning, or None.
        inside: whether the answer begins with reasoning.
        shows: whether the message has its reasoning.
    """

    tools: Tools | None = None
    reasoning: ReasoningFormat | None = None
    inside: bool = False
    shows: bool = True

    def make_parser(self) -> MessageParser:
        """Returns a parser of a choice's text."""
        tools = self.tools
        return MessageParser(
            None if tools is None else tools.form,
            self.reasoning,
            inside=self.inside,
            names=() if tools is None else tools.schemas,
            most=None if tools is None else tools.most,
        )


class ParsedRequest(NamedTuple):
    """Request body whose fields have been checked.

    Attributes:
        model: name of the model that the client has given.
        requests: requests of the engine, a request for each prompt. All have the same sampling except for the seed. In
            place of an adapter's digest a request has the adapter's name, which the ranks look up.
        stream: whether the answer comes in pieces.
        usage: whether the last piece has the usage.
        logprobs: number of most probable tokens that the answer has next to each token, or None for an answer without
            log probabilities.
        echo: whether a choice's text begins with its prompt.
        scores: whether the answer has no completion: `max_tokens` is 0, and the token that the engine draws at least is
            left out.
        rules: rules of messages. Without rules a message is the text of its choice.
        grammar_field: field that has the grammar.
        beams: rule of a beam search in place of draws, or None.
    """

    model: str
    requests: list[Request]
    stream: bool
    usage: bool
    logprobs: int | None
    echo: bool = False
    scores: bool = False
    rules: MessageRules | None = None
    grammar_field: str = "response_format"
    beams: BeamSearch | None = None


class PooledRequest(NamedTuple):
    """A body, checked, whose answer has results in place of tokens.

    Attributes:
        stages: requests of the engine. A stage begins at the end of the stage before, and finds its prompts in the
            prefix cache.
        event: function that makes the event of each request.
        write: function from the results, in the order of the requests, and the number of tokens to the answer.
    """

    stages: list[list[Request]]
    event: MakeEvent
    write: Callable[[list[Any], int], dict[str, Any]]


def parse_completions(body: Mapping[str, Any], model: Model) -> ParsedRequest:
    """Returns the meaning of a body of `/v1/completions`.

    Raises:
        ApiError: names the field that is wrong.
    """
    given = read_fields(body, COMPLETIONS)
    adapter = adapter_of(given, model)
    top, n, echo = given.get("logprobs"), given.get("n", 1), given.get("echo", False)
    if top is not None and not 0 <= top <= _OLDER_TOP:
        raise ApiError(400, f"logprobs must be an integer from 0 to {_OLDER_TOP}, got {top}.", "logprobs")
    if echo and model.start is not None:
        text = f"echo is not served: {model.name!r} is an encoder-decoder model, whose prompt is no part of its text."
        raise ApiError(400, f"{text} Leave it out.", "echo", "unsupported_parameter")
    if given.get("best_of", n) != n:
        text = f"best_of is {given['best_of']}, which is not served; leave it out, or give {n}, the value of n."
        raise ApiError(400, text, "best_of", "unsupported_parameter")

    def check_number(num: int) -> None:
        if num * n > model.max_choices:
            text = f"n must give at most {model.max_choices} choices, got {num * n} for n={n} and {num} prompts."
            raise ApiError(400, text, "n")

    placed = _place_prompts(given, model, check_number)
    most = given.get("max_tokens", _COMPLETION)
    scores = echo and most == 0
    asked = _make_asked(given, placed, model, adapter, 1 if scores else most, top)._replace(echo=echo, scores=scores)
    if not scores:
        return asked
    plain: dict[str, Any] = {"stop": (), "stop_tokens": (), "grammar": None}  # of a text that is left out
    return asked._replace(requests=[replace(x, sampling=replace(x.sampling, **plain)) for x in asked.requests])


def _place_prompts(given: Mapping[str, Any], model: Model, check_number: Callable[[int], None]) -> list[dict[str, Any]]:
    """Returns the fields of a request for each prompt: first the prompts by embeddings, then the others."""
    embedded = read_prompt_embeds(given, model, check_number) if "prompt_embeds" in given else []
    if embedded and "prompt" not in given:
        return embedded
    prompts = read_prompts(given, model, "prompt", lambda num: check_number(num + len(embedded)))
    return [*embedded, *map(model.place_prompt, prompts)]


def parse_chat(body: Mapping[str, Any], model: Model) -> ParsedRequest:
    """Returns the meaning of a body of `/v1/chat/completions`.

    Raises:
        ApiError: names the field that is wrong, or the tokenizer has no chat template.
    """
    given = read_fields(body, CHAT)
    adapter = adapter_of(given, model)
    top = given.get("top_logprobs", 0) if given.get("logprobs") else None
    if top is None and given.get("top_logprobs", 0) != 0:
        raise ApiError(400, "top_logprobs has no effect without logprobs: true. Leave it out.", "top_logprobs")
    if "max_completion_tokens" in given and "max_tokens" in given:
        raise ApiError(400, "max_tokens cannot be combined with max_completion_tokens. Give one of them.", "max_tokens")
    tools = read_tools(given, model)
    prompt = read_chat(given, model, () if tools is None else tools.listed)
    # An expression is the language of the whole text, so that there are neither calls nor reasoning.
    rules = MessageRules(tools, model.reasoning, prompt.inside, given.get("include_reasoning", True))
    if "regex" in given:
        if tools is not None:
            raise ApiError(400, "regex cannot be combined with tools. Give one of them.", "regex")
        rules = MessageRules()
    placed: dict[str, Any] = model.place_prompt(prompt.ids) | {"images": prompt.images}
    rest = max(1, model.limits.context - len(placed["prompt"]))
    most = given.get("max_completion_tokens", given.get("max_tokens", rest))
    plain = rules.tools is None and rules.reasoning is None
    return _make_asked(given, [placed], model, adapter, most, top, None if plain else rules)


def _make_asked(
    given: Mapping[str, Any],
    placed: list[dict[str, Any]],
    model: Model,
    adapter: bytes,
    most: int,
    top: int | None,
    rules: MessageRules | None = None,
) -> ParsedRequest:
    """Returns the meaning of a body whose prompts are fields of requests."""
    check_generates(model)
    if most < 1:  # an engine's request without draws has no answer here
        field = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
        raise ApiError(400, f"{field} must be an integer from 1 to {model.limits.context - 1}, got {most}.", field)
    ends = frozenset() if given.get("ignore_eos") else model.ends
    defaults = {} if given.get("use_beam_search") else model.defaults
    numbers: dict[str, Any] = {**defaults, "max_tokens": most}
    numbers |= {x: tuple(y) if isinstance(y := given[x], list) else y for x in SAMPLING if x in given}
    if numbers.get("top_k") == -1:  # all tokens, in vLLM's words
        numbers["top_k"] = 0
    draws_seed = numbers.get("seed", -1) == -1  # -1 is vLLM's word for a seed that the server draws
    numbers |= {"seed": 0} if draws_seed else {}
    if rules is not None and _has_special_markers(rules, model):
        numbers["skip_special_tokens"] = False
    stop_tokens = tuple(dict.fromkeys([*given.get("stop_token_ids", ()), *sorted(ends)]))
    sampling = Sampling(
        **numbers,
        reasoning_budget=_read_budget(given, model, rules),
        stop_tokens=stop_tokens,
        logit_bias=_read_biases(given.get("logit_bias", {})),
        top_logprobs=top or 0,
        stop=_list_stops(given.get("stop", "")),
        include_stop=given.get("include_stop_str_in_output", False),
        prompt_logprobs=given.get("echo", False) and top is not None,
    )
    salt = given.get("cache_salt", "").encode()
    requests = [Request(**each, sampling=sampling, salt=salt, adapter=adapter) for each in placed]
    check_fields(requests, model.limits, given)
    try:
        for request in requests:
            if request.images is not None and request.images.is_text:
                check_embedded(request, model.embed_size)
        check_names(requests[0], model.processors)
        encoded = encode_sampling(sampling, model.texts.encode)
    except ValueError as error:
        field = str(error).split()[0]
        raise ApiError(400, str(error), field) from error
    field, grammar = _make_grammar(given, model, stop_tokens, rules)
    if grammar is not None:
        encoded = replace(encoded, grammar=grammar)
    if encoded is not sampling:
        requests = [replace(request, sampling=encoded) for request in requests]
        check_fields(requests, model.limits, given)
    if draws_seed:  # equal prompts of a single request have different draws
        requests = [replace(r, sampling=replace(r.sampling, seed=draw_seed())) for r in requests]
    stream, options = given.get("stream", False), given.get("stream_options")
    if options is not None and not stream:
        raise ApiError(400, "stream_options has no effect without stream: true. Leave it out.", "stream_options")
    usage = read_fields(options or {}, OPTIONS, "stream_options").get("include_usage", False)
    asked = ParsedRequest(given["model"], requests, stream, usage, top)
    return asked._replace(rules=rules, grammar_field=field, beams=read_beams(given, requests[0].sampling, field))


def _read_budget(given: Mapping[str, Any], model: Model, rules: MessageRules | None) -> ReasoningBudget | None:
    tokens = given.get("thinking_token_budget")
    if tokens is None:
        return None
    if rules is None or rules.reasoning is None:
        text = f"thinking_token_budget is not served: the text of {model.name!r} has no form of reasoning here."
        raise ApiError(400, f"{text} Leave it out.", "thinking_token_budget", "unsupported_parameter")
    form = rules.reasoning
    if not form.channels:
        return ReasoningBudget(tokens, form.begin, form.end, rules.inside)
    after = "<|start|>assistant" if rules.tools is not None else "<|start|>assistant<|channel|>final<|message|>"
    return ReasoningBudget(tokens, "<|channel|>analysis<|message|>", form.end, forced=form.end + after)


def _has_special_markers(rules: MessageRules, model: Model) -> bool:
    tools, reasoning = rules.tools, rules.reasoning
    markers = [] if tools is None else [tools.form.begin, tools.form.end]
    markers += [] if reasoning is None else [reasoning.begin, reasoning.end]
    return any(model.find_special(marker) is not None for marker in markers)


def _list_stops(given: str | list[str]) -> tuple[str, ...]:
    """Returns the stop strings. An empty string in their place is not a stop string."""
    return ((given,) if given else ()) if isinstance(given, str) else tuple(given)


def _read_biases(given: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    for token, bias in given.items():
        if not (token.isascii() and token.isdigit() and len(token) < 20):
            text = f"logit_bias has a field {token[:60]!r}; each must be the id of a token, such as '50256'."
            raise ApiError(400, text, "logit_bias")
        if not NUMBER.has(bias):
            text = f"logit_bias of token {token} must be a number from -100 to 100."
            raise ApiError(400, text, "logit_bias")
    return tuple((int(token), bias) for token, bias in given.items())


def draw_seed() -> int:
    """Returns the seed of a request without a seed."""
    return secrets.randbits(_SEED_BITS)


def check_generates(model: Model) -> None:
    """Checks that a model has logits of tokens.

    Raises:
        ApiError: the model has only classes.
    """
    if not model.generates:
        text = f"model {model.name!r} has classes in place of tokens. Use /classify, /v1/score or /v1/rerank."
        raise ApiError(400, text, "model", "unsupported_parameter")


def check_fields(requests: Sequence[Request], limits: Limits, given: Mapping[str, Any]) -> None:
    """Refuses values out of range.

    Raises:
        ApiError: names the field, and the prompt if there are several.
    """
    for i, request in enumerate(requests):
        _check_request(request, limits, f"prompt {i} of {len(requests)}: " if len(requests) > 1 else "", given)


def _check_request(request: Request, limits: Limits, where: str, given: Mapping[str, Any]) -> None:
    try:
        check_request(request, limits)
    except ValueError as error:
        name = str(error).split()[0].partition("[")[0]
        names = {"stop_tokens": "stop_token_ids", "reasoning_budget.tokens": "thinking_token_budget"}
        field = names.get(name, name)
        if field == "prompt":
            field = next(name for name in _PROMPTS if name in given)
        if field == "max_tokens" and "max_completion_tokens" in given:
            field = "max_completion_tokens"
        code = "context_length_exceeded" if request.given and "context" in str(error) else None
        raise ApiError(400, where + str(error).replace(name, field, 1), field, code) from error


def _make_grammar(
    given: Mapping[str, Any], model: Model, stop_tokens: Sequence[int], rules: MessageRules | None
) -> tuple[str, Grammar | None]:
    """Returns the field and the language of the text, compiled once, so that no wrong grammar is admitted."""
    schema = _get_schema(given["response_format"]) if "response_format" in given else None
    if schema is not None and "regex" in given:
        raise ApiError(400, "regex cannot be combined with response_format. Give one of them.", "regex")
    tools = None if rules is None else rules.tools
    field = "regex" if "regex" in given else "response_format" if schema is not None else "tools"
    if tools is not None and not tools.form.begin and schema is not None and not tools.forced:
        text = f"response_format cannot be combined with tools whose calls have no marker (format {tools.form.name!r})."
        raise ApiError(400, f"{text} Give one of them.", field)
    if schema is None and "regex" not in given and not (tools is not None and (tools.forced or tools.strict)):
        return field, None
    if model.compiler is None:
        text = "needs llguidance (pip install 'shardfn[text]'), and a tokenizer whose tokens have bytes of their own."
        raise ApiError(400, f"{field} is not served: it {text}", field, "unsupported_parameter")
    if tools is not None:
        check_schemas(tools, model)
    try:
        if "regex" in given:
            made = Grammar.regex(given["regex"])
        elif rules is None:
            assert schema is not None
            made = Grammar.json_schema(schema)
        else:
            if schema is not None:  # separately, since the whole may begin with free text
                model.compiler.compile(Grammar.json_schema(schema), stop_tokens)
            language = AnswerGrammar() if tools is None else tools.grammar
            language = language._replace(answer=schema, reasoning=rules.reasoning, inside=rules.inside)
            made = Grammar.lark(language.write(model.find_special))
        model.compiler.compile(made, stop_tokens)  # as the engine will: a text that no token can begin is refused
    except ValueError as error:
        raise ApiError(400, f"{field}: {str(error).removeprefix('grammar: ')}", field) from error
    return field, made


def _get_schema(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the schema that a format asks for, or None for any text."""
    found = read_fields(given, FORMAT, "response_format")
    kind = get_required(found, "type", "response_format")
    if kind not in ("text", "json_object", "json_schema"):
        text = f"response_format.type must be 'text', 'json_object' or 'json_schema', got {kind!r:.60}."
        raise ApiError(400, text, "response_format.type")
    if kind != "json_schema":
        if "json_schema" in found:
            at = "response_format.json_schema"
            raise ApiError(400, f"{at} has no effect with type {kind!r}. Use type 'json_schema'.", at)
        return {"type": "object"} if kind == "json_object" else None
    inner = read_fields(found.get("json_schema", {}), SCHEMA, "response_format.json_schema")
    return get_required(inner, "schema", "response_format.json_schema")
