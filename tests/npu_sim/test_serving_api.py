"""OpenAI's API, asked by OpenAI's own client, over an engine that says what a test wants."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_engine import CONTEXT, HERMES, LLAMA, Script, Served, client_of, served, text_checkpoint

from npu_sim.llm import Checkpoint
from npu_sim.serving.http.errors import APIError
from npu_sim.serving.http.schemas import ChatRequest, parse
from npu_sim.serving.http.text import ModelText
from npu_sim.serving.http.tools import CallParser, format_of
from npu_sim.serving.request import Request, SamplingSettings

HELLO = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return text_checkpoint(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def server(checkpoint: Checkpoint) -> Iterator[Served]:
    with served(checkpoint) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return client_of(server)


def content_of(chunks: Any, choice: int = 0) -> str:
    return "".join(part.delta.content or "" for chunk in chunks for part in chunk.choices if part.index == choice)


def test_models_are_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").context_length == 2048
    with pytest.raises(openai.NotFoundError, match="there is no model 'huge' here"):
        client.models.retrieve("huge")


def test_a_chat_is_answered(client: Any, server: Served, checkpoint: Checkpoint) -> None:
    reply = client.chat.completions.create(model="tiny", messages=HELLO)
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello, world!", "stop")
    request = server.engine.requests[-1]
    assert checkpoint.tokenizer.decode(request.prompt) == "<|im|>user\nHi</s><|im|>assistant\n"
    assert reply.usage.prompt_tokens == len(request.prompt)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    room = CONTEXT - len(request.prompt)
    assert (request.max_new_tokens, request.sampling.temperature, request.tenant) == (room, 1.0, "")


def test_a_stream_is_the_whole_reply_in_pieces(client: Any) -> None:
    options = {"model": "tiny", "messages": HELLO, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**options))
    assert len(chunks) > 6 and len({chunk.id for chunk in chunks}) == 1
    assert [content_of(chunks, choice) for choice in (0, 1)] == ["Hello, world!", "Hello, world!"]
    reasons = [part.finish_reason for chunk in chunks for part in chunk.choices if part.finish_reason]
    assert reasons == ["stop", "stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_settings_reach_the_engine(client: Any, server: Served) -> None:
    client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0.5, top_p=0.9, seed=7, n=2, stop=["w", "x"],
        max_completion_tokens=40, extra_body={"top_k": 5},
    )  # fmt: skip
    first, second = server.engine.requests[-2:]
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.top_p) == (0.5, 5, 0.9)
    assert (first.sampling.seed, second.sampling.seed) == (7, 8)
    assert (first.stop, first.max_new_tokens, first.logprobs) == (("w", "x"), 40, None)


def test_a_stop_string_and_a_limit_end_a_reply(client: Any) -> None:
    stopped = client.chat.completions.create(model="tiny", messages=HELLO, stop="wor").choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("Hello, ", "stop")
    limited = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1).choices[0]
    assert limited.finish_reason == "length" and len(limited.message.content) < 13


def test_log_probabilities_name_tokens_by_their_bytes(client: Any) -> None:
    found = client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=2).choices[0]
    entries = found.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == found.message.content
    assert all(len(entry.top_logprobs) == 2 and entry.logprob == -0.5 for entry in entries)
    plain = client.completions.create(model="tiny", prompt="Hi", logprobs=1).choices[0]
    assert "".join(plain.logprobs.tokens) == plain.text
    assert plain.logprobs.text_offset == [plain.text.index(token, start) for token, start in zip(
        plain.logprobs.tokens, plain.logprobs.text_offset, strict=True)]  # fmt: skip


def test_completions_take_texts_and_token_ids(client: Any, server: Served, checkpoint: Checkpoint) -> None:
    reply = client.completions.create(model="tiny", prompt=["Hi", "the cat"], n=2, echo=True)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in reply.choices] == ["HiHello, world!"] * 2 + ["the catHello, world!"] * 2
    ids = checkpoint.tokenizer.encode("the cat")
    assert reply.usage.prompt_tokens == len(checkpoint.tokenizer.encode("Hi")) + len(ids)
    client.completions.create(model="tiny", prompt=ids)
    assert server.engine.requests[-1].prompt == tuple(ids)
    assert server.engine.requests[-1].max_new_tokens == 16
    streamed = client.completions.create(model="tiny", prompt=[ids, ids], stream=True, echo=True)
    texts = ["", ""]
    for chunk in streamed:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["the catHello, world!"] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_with_log_probabilities_has_those_of_the_prompt_too(
    client: Any, checkpoint: Checkpoint, stream: bool
) -> None:
    options = {"model": "tiny", "prompt": [checkpoint.tokenizer.encode("the cat"), [7]], "echo": True, "logprobs": 2}
    choices: dict[int, list[Any]] = {0: [], 1: []}
    for reply in (
        client.completions.create(**options, stream=True) if stream else [client.completions.create(**options)]
    ):
        for choice in reply.choices:
            choices[choice.index].append(choice)
    for index, ids in enumerate(options["prompt"]):
        parts = [part.logprobs for part in choices[index] if part.logprobs is not None]
        joined = {
            name: [item for part in parts for item in getattr(part, name)]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        text = "".join(part.text for part in choices[index])
        assert "".join(joined["tokens"]) == text and text.endswith("Hello, world!")
        assert joined["token_logprobs"][0] is None and joined["top_logprobs"][0] is None
        assert set(joined["token_logprobs"][1:]) == {-0.5} and all(len(top) == 2 for top in joined["top_logprobs"][1:])
        assert joined["text_offset"] == [len("".join(joined["tokens"][:n])) for n in range(len(joined["tokens"]))]
        assert len({len(values) for values in joined.values()}) == 1
        if not stream:
            assert len(joined["tokens"]) > len(ids)


def test_max_tokens_of_0_return_the_prompt_alone(client: Any) -> None:
    reply = client.completions.create(model="tiny", prompt="the cat", max_tokens=0, echo=True, logprobs=0)
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason, reply.usage.completion_tokens) == ("the cat", "length", 0)
    assert "".join(choice.logprobs.tokens) == "the cat"


def test_prompt_logprobs_have_the_form_of_vllm(client: Any, checkpoint: Checkpoint) -> None:
    ids = checkpoint.tokenizer.encode("the cat")
    extra = {"prompt_logprobs": 1}
    reply = client.completions.create(model="tiny", prompt=ids, extra_body=extra, logprobs=3, echo=True)
    first, *others = reply.choices[0].prompt_logprobs
    assert first is None and [list(entry) for entry in others] == [[str(token)] for token in ids[1:]]
    shown = "".join(entry[str(token)]["decoded_token"] for token, entry in zip(ids[1:], others, strict=True))
    assert "the cat".endswith(shown)
    assert all(entry[str(token)]["logprob"] == -0.5 for token, entry in zip(ids[1:], others, strict=True))
    assert all(len(top) == 3 for top in reply.choices[0].logprobs.top_logprobs[1:])
    chat = client.chat.completions.create(model="tiny", messages=HELLO, n=2, extra_body=extra)
    assert chat.prompt_logprobs[0] is None and len(chat.prompt_logprobs) == chat.usage.prompt_tokens
    assert not hasattr(client.completions.create(model="tiny", prompt=ids).choices[0], "prompt_logprobs")


def test_64_clients_at_once_are_each_answered(checkpoint: Checkpoint) -> None:
    def echo(request: Request) -> Script:
        text = checkpoint.tokenizer.decode(request.prompt).split("\n")[1].removesuffix("</s><|im|>assistant")
        return Script(f"You said {text}.", delay=0.001)

    with served(checkpoint, echo) as running:
        client = client_of(running)

        def ask(number: int) -> str:
            messages = [{"role": "user", "content": f"number {number}"}]
            reply = client.chat.completions.create(model="tiny", messages=messages, stream=number % 2 == 0)
            return content_of(reply) if number % 2 == 0 else reply.choices[0].message.content

        with ThreadPoolExecutor(64) as pool:
            replies = list(pool.map(ask, range(64)))
        assert replies == [f"You said number {number}." for number in range(64)]
        running.wait_until(lambda: running.application.guard.active == 0 and not running.engine.active)


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"foo": 1}, "unknown parameter 'foo'"),
    ({"model": "huge"}, "there is no model 'huge' here; this is tiny"),
    ({"messages": []}, "invalid 'messages': list should have at least 1 item"),
    ({"messages": [{"role": "boss", "content": "x"}]}, "invalid 'messages.0.role'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'messages.0.content.0.type'"),
    ({"messages": "Hi"}, "invalid 'messages'"),
    ({"temperature": 3}, "invalid 'temperature': input should be less than or equal to 2"),
    ({"temperature": "hot"}, "invalid 'temperature': input should be a valid number"),
    ({"top_p": 0}, "invalid 'top_p': input should be greater than 0"),
    ({"n": 17}, "invalid 'n': input should be less than or equal to 16"),
    ({"n": True}, "invalid 'n': input should be a valid integer"),
    ({"stop": [""]}, "invalid 'stop.0'"),
    ({"max_tokens": 0}, "invalid 'max_tokens'"),
    ({"max_tokens": 3000}, "tokens and the reply up to 3000, but the context holds 2048"),
    ({"messages": [{"role": "user", "content": "x" * 3000}]}, "but the context holds 2048"),
    ({"top_logprobs": 2}, "'top_logprobs' is for 'logprobs': true"),
    ({"stream_options": {"include_usage": True}}, "'stream_options' is for 'stream': true"),
    ({"frequency_penalty": 2.5}, "invalid 'frequency_penalty': input should be less than or equal to 2"),
    ({"presence_penalty": -3}, "invalid 'presence_penalty': input should be greater than or equal to -2"),
    ({"repetition_penalty": 0}, "invalid 'repetition_penalty': input should be greater than 0"),
    ({"min_p": 2}, "invalid 'min_p'"),
    ({"typical_p": 0}, "invalid 'typical_p'"),
    ({"min_tokens": -1}, "invalid 'min_tokens'"),
    ({"stop_token_ids": [-1]}, "invalid 'stop_token_ids.0'"),
    ({"logit_bias": {"the": 1}}, "'logit_bias' names 'the', which is no token id"),
    ({"logit_bias": {"5": 101}}, "invalid 'logit_bias.5': input should be less than or equal to 100"),
    ({"best_of": 2}, "unknown parameter 'best_of'"),
    ({"reasoning_effort": "low"}, "has no variable 'reasoning_effort'"),
    ({"reasoning_effort": "most"}, "invalid 'reasoning_effort'"),
    ({"guided_regex": "[a-"}, "the regular expression cannot be used"),
    ({"guided_grammar": "start: x"}, "the grammar cannot be used"),
    ({"guided_regex": "a", "guided_grammar": "b"}, "'guided_regex' and 'guided_grammar' exclude each other"),
    ({"guided_regex": "a", "tools": [CLOCK]}, "exclude 'tools' and 'response_format'"),
    ({"tool_choice": "required"}, "'tool_choice' needs 'tools'"),
    ({"tools": [CLOCK, CLOCK]}, "two of 'tools' have the same name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "invalid 'tools.0.function.name'"),
    (
        {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        "'tool_choice' names 'get_weather', which is not among 'tools'",
    ),
    ({"response_format": {"type": "json_schema"}}, "'json_schema' is for type 'json_schema', which needs it"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "blob"}}}},
        "the JSON schema cannot be used",
    ),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "has no variable 'enable_thinking'"),
    ({"chat_template_kwargs": {"messages": 1}}, "has no variable 'messages'"),
]


@pytest.mark.parametrize(("wrong", "message"), BAD_CHATS, ids=[json.dumps(wrong)[:50] for wrong, _ in BAD_CHATS])
def test_a_wrong_chat_is_refused_by_name(client: Any, server: Served, wrong: dict[str, Any], message: str) -> None:
    before = len(server.engine.requests)
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, extra_body=wrong)
    assert caught.value.status_code == (404 if "model" in wrong else 400)
    assert message in caught.value.body["message"]
    assert len(server.engine.requests) == before


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "give 1 to 128 prompts, not 0"),
        ({"prompt": [999]}, "the model has no token 999; ids are 0 to 303"),
        ({"prompt": {"a": 1}}, "invalid 'prompt'"),
        ({"prompt_logprobs": 1, "stream": True}, "'prompt_logprobs' come with whole replies; leave out 'stream'"),
        ({"prompt_logprobs": -1}, "invalid 'prompt_logprobs'"),
        ({"prompt_logprobs": 21}, "invalid 'prompt_logprobs'"),
        ({"prompt_logprobs": 10**30}, "invalid 'prompt_logprobs'"),
        ({"prompt_logprobs": True}, "invalid 'prompt_logprobs'"),
        ({"max_tokens": -1}, "invalid 'max_tokens'"),
        ({"suffix": "x"}, "unknown parameter 'suffix'"),
        ({"best_of": 2, "n": 3}, "'best_of' must be at least 'n'"),
        ({"best_of": 3, "stream": True}, "'best_of' needs whole replies; leave out 'stream'"),
    ],
)
def test_a_wrong_completion_is_refused_by_name(client: Any, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.completions.create(**{"model": "tiny", "prompt": "Hi", "extra_body": wrong})


def test_parameters_that_ask_for_nothing_are_taken(client: Any) -> None:
    client.chat.completions.create(
        model="tiny", messages=HELLO, frequency_penalty=0, presence_penalty=0.0, logit_bias={}, store=False, user="me",
        parallel_tool_calls=True, response_format={"type": "text"}, metadata={"a": "b"},
    )  # fmt: skip


def test_settings_of_sampling_reach_the_engine(client: Any, server: Served) -> None:
    client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        presence_penalty=0.5,
        frequency_penalty=-1,
        logit_bias={"7": -100, "9": 2.5},
        extra_body={"min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.3, "min_tokens": 4,
                    "stop_token_ids": [11], "ignore_eos": True},
    )  # fmt: skip
    request = server.engine.requests[-1]
    expected = SamplingSettings(1.0, None, None, None, 1.3, 0.5, -1.0, 0.1, 0.9, ((7, -100.0), (9, 2.5)), 4)
    assert request.sampling == expected
    assert (request.stop_token_ids, request.ignore_eos) == (frozenset({11}), True)


def test_settings_of_the_generation_config_hold_where_a_request_names_none(checkpoint: Checkpoint) -> None:
    wise = replace(checkpoint, sampling={"temperature": 0.6, "top_k": 20, "top_p": 0.95})
    with served(wise) as running:
        client = client_of(running)
        client.chat.completions.create(model="tiny", messages=HELLO)
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=0, top_p=1)
        first, second = (request.sampling for request in running.engine.requests[-2:])
        (model,) = client.models.list()
        assert model.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert (first.temperature, first.top_k, first.top_p) == (0.6, 20, 0.95)
    assert (second.temperature, second.top_k, second.top_p) == (0.0, 20, None)


def test_texts_become_tokens_and_tokens_texts(server: Served, checkpoint: Checkpoint) -> None:
    def post(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        sent = urllib.request.Request(
            f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(sent) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    ids = checkpoint.tokenizer.encode("the cat")
    whole = {"tokens": ids, "count": len(ids), "max_model_len": CONTEXT}
    assert post("/tokenize", {"prompt": "the cat"}) == (200, whole)
    assert post("/detokenize", {"model": "tiny", "tokens": ids}) == (200, {"prompt": "the cat"})
    _, chat = post("/tokenize", {"messages": HELLO})
    server.engine.requests.clear()
    client_of(server).chat.completions.create(model="tiny", messages=HELLO)
    assert tuple(chat["tokens"]) == server.engine.requests[-1].prompt
    for path, body, message in (
        ("/tokenize", {}, "give either 'prompt' or 'messages'"),
        ("/tokenize", {"prompt": "x", "model": "huge"}, "there is no model 'huge' here"),
        ("/detokenize", {"tokens": [999]}, "the model has no token 999; ids are 0 to 303"),
        ("/detokenize", {"tokens": [-1]}, "invalid 'tokens.0'"),
    ):
        status, reply = post(path, body)
        assert status in (400, 404)
        assert message in reply["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"guided_regex": "[0-9]{2}/[a-c]"}, "42/b", "4/b"),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, "no", "maybe"),
        ({"guided_grammar": 'start: "yes" | "no"'}, "yes", "none"),
    ],
)
def test_guided_replies_follow_their_grammar(
    client: Any, server: Served, checkpoint: Checkpoint, fields: dict[str, str], right: str, wrong: str
) -> None:
    client.chat.completions.create(model="tiny", messages=HELLO, extra_body=fields)
    client.completions.create(model="tiny", prompt="Hi", extra_body=fields)
    chat, plain = (request.token_filter for request in server.engine.requests[-2:])
    assert chat is not None
    assert chat.rules == plain.rules
    for text, follows in ((right, True), (wrong, False)):
        rules = ModelText(checkpoint).grammars.filter(chat.rules)
        allowed = True
        for token in checkpoint.tokenizer.encode(text, add_special_tokens=False):
            allowed = allowed and bool(rules.allowed()[token])
            if allowed:
                rules.advance(token)
        assert allowed == follows, text


def test_unknown_parameters_are_left_out_where_asked_for() -> None:
    body = {"model": "tiny", "messages": HELLO, "foo": 1, "modalities": ["audio"], "temperature": 0.5}
    with pytest.raises(APIError, match="unknown parameter 'foo'|not supported"):
        parse(ChatRequest, body)
    assert parse(ChatRequest, body, lenient=True).temperature == 0.5
    with pytest.raises(APIError, match="invalid 'temperature'"):
        parse(ChatRequest, {**body, "temperature": 3}, lenient=True)


def test_reasoning_effort_is_a_variable_of_the_template() -> None:
    body = {"model": "tiny", "messages": HELLO, "reasoning_effort": "low", "chat_template_kwargs": {"thinking": True}}
    assert parse(ChatRequest, body).template_values == {"reasoning_effort": "low", "thinking": True}


def test_the_most_probable_of_several_completions_is_returned(client: Any, server: Served) -> None:
    reply = client.completions.create(model="tiny", prompt=["Hi", "the cat"], n=2, best_of=3)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert all(choice.text == "Hello, world!" and choice.logprobs is None for choice in reply.choices)
    assert [request.logprobs for request in server.engine.requests[-6:]] == [0] * 6


def test_an_error_of_the_engine_reaches_the_client(checkpoint: Checkpoint) -> None:
    with served(checkpoint, Script("the cat", error="the device is lost")) as running:
        client = client_of(running)
        with pytest.raises(openai.InternalServerError, match="the device is lost"):
            client.chat.completions.create(model="tiny", messages=HELLO, n=2)
        chunks: list[Any] = []
        with pytest.raises(openai.APIError, match="the device is lost"):
            for chunk in client.chat.completions.create(model="tiny", messages=HELLO, stream=True):
                chunks.append(chunk)  # noqa: PERF402 -- keeps those before the error
        assert content_of(chunks) == "the cat"
        running.wait_until(lambda: not running.engine.active)


def test_tools_are_explained_to_a_model_whose_template_knows_none(
    client: Any, server: Served, checkpoint: Checkpoint
) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]  # fmt: skip
    client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER], max_tokens=1)
    prompt = checkpoint.tokenizer.decode(server.engine.requests[-1].prompt)
    system, rest = prompt.split("</s>", 1)
    assert system.startswith("<|im|>system\nBe brief.\n\nYou may call one or more functions")
    assert json.dumps(WEATHER["function"]) in system
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in rest
    assert "<|im|>user\n<tool_response>\nrain\n</tool_response>" in rest


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return text_checkpoint(tmp_path_factory.mktemp("hermes"), HERMES)


def test_calls_in_a_reply_are_told_from_its_text(hermes: Checkpoint) -> None:
    with served(hermes, Script(f"Let me see.\n{CALL}\n{CALL}")) as running:
        client = client_of(running)
        options: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": [WEATHER, CLOCK]}
        (choice,) = client.chat.completions.create(**options).choices
        assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert calls == [("get_weather", {"city": "Oslo", "days": 2})] * 2
        chunks = list(client.chat.completions.create(**options, stream=True))
        assert content_of(chunks) == "Let me see."
        parts = [call for chunk in chunks for part in chunk.choices for call in part.delta.tool_calls or ()]
        assert [(part.index, part.function.name) for part in parts] == [(0, "get_weather"), (1, "get_weather")]
        assert parts[0].id != parts[1].id
        untold = client.chat.completions.create(**options, tool_choice="none").choices[0]
        assert untold.message.content.count("<tool_call>") == 2 and untold.finish_reason == "stop"
        prompt = hermes.tokenizer.decode(running.engine.requests[0].prompt)
        assert prompt.startswith('<tools>{"type": "function", "function": {"name": "get_weather"')


def test_variables_of_the_chat_template_can_be_set(hermes: Checkpoint) -> None:
    with served(hermes) as running:
        client_of(running).chat.completions.create(
            model="tiny", messages=HELLO, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
        )
        assert hermes.tokenizer.decode(running.engine.requests[0].prompt).endswith("<think></think>")


@pytest.mark.parametrize("template", [HERMES, LLAMA], ids=["hermes", "llama"])
def test_a_required_call_that_a_limit_cuts_off_leaves_no_fragment(template: str) -> None:
    form = format_of(template)
    call = f'{form.begin}{{"name": "get_time", "{form.arguments}": {{}}}}{form.end}'
    whole = f"{call}\n{call}" if form.end else call
    for end in range(len(whole) + 1):
        parser = CallParser(form, ["get_time"], only_calls=True)
        parts = [parser.push(letter) for letter in whole[:end]] + [parser.flush()]
        assert "".join(text for text, _ in parts) == ""
        assert len([found for _, calls in parts for found in calls]) == parser.calls
        assert parser.calls == (2 if form.end else 1) or end < len(whole)


@pytest.mark.parametrize("template", [HERMES, LLAMA], ids=["hermes", "llama"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_required_call_fits_its_schema(template: str, choice: Any, tmp_path: Path) -> None:
    with served(text_checkpoint(tmp_path, template)) as running:
        for seed in range(4):
            (reply,) = client_of(running).chat.completions.create(
                model="tiny", messages=HELLO, tools=[WEATHER, CLOCK], tool_choice=choice, seed=seed,
                parallel_tool_calls=False,
            ).choices  # fmt: skip
            (call,) = reply.message.tool_calls
            assert reply.finish_reason == "tool_calls" and reply.message.content is None
            arguments = json.loads(call.function.arguments)
            if call.function.name == "get_weather":
                assert isinstance(arguments["city"], str) and 1 <= arguments["days"] <= 9
            else:
                assert choice == "required" and isinstance(arguments, dict)


def test_a_reply_fits_the_schema_that_is_asked_for(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}, "count": {"$ref": "#/$defs/count"}},
        "required": ["kind", "count"],
        "additionalProperties": False,
        "$defs": {"count": {"type": "integer", "minimum": 0, "maximum": 99}},
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "pets", "schema": schema, "strict": True}}
    for options in ({}, {"tools": [CLOCK]}):
        reply = client.chat.completions.create(model="tiny", messages=HELLO, response_format=wanted, seed=3, **options)
        message = reply.choices[0].message
        if message.tool_calls is None:
            found = json.loads(message.content)
            assert found["kind"] in ("cat", "dog") and 0 <= found["count"] <= 99
        else:
            assert options and message.tool_calls[0].function.name == "get_time"
    anything = client.chat.completions.create(model="tiny", messages=HELLO, response_format={"type": "json_object"})
    assert isinstance(json.loads(anything.choices[0].message.content), dict)
