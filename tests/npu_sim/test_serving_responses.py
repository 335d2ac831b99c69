"""`/v1/responses`, asked by OpenAI's own client, over an engine that says what a test wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_engine import CONTEXT, HERMES, Script, Served, client_of, served, text_checkpoint

from npu_sim.llm import Checkpoint
from npu_sim.serving.http.errors import APIError
from npu_sim.serving.http.responses import KeptResponses
from npu_sim.serving.http.schemas import Message

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


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


def prompt_of(server: Served) -> str:
    """The text of the latest request to the engine."""
    return str(server.engine.tokenizer.decode(server.engine.requests[-1].prompt))


def test_a_text_and_instructions_are_answered(client: Any, server: Served) -> None:
    reply = client.responses.create(model="tiny", input="Hi", instructions="Be brief.", temperature=0.5)
    assert prompt_of(server) == "<|im|>system\nBe brief.</s><|im|>user\nHi</s><|im|>assistant\n"
    assert (reply.output_text, reply.status, reply.object) == ("Hello, world!", "completed", "response")
    assert (reply.instructions, reply.temperature, reply.model) == ("Be brief.", 0.5, "tiny")
    request = server.engine.requests[-1]
    assert reply.usage.input_tokens == len(request.prompt)
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert (request.sampling.temperature, request.max_new_tokens) == (0.5, CONTEXT - len(request.prompt))


def test_items_of_all_kinds_become_a_chat(client: Any, server: Served) -> None:
    parts = [{"type": "input_text", "text": "Weather in "}, {"type": "input_text", "text": "Oslo?"}]
    client.responses.create(
        model="tiny",
        input=[
            {"role": "developer", "content": "Be kind."},
            {"type": "message", "role": "user", "content": parts},
            {"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": "Let me see."},
            {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": '{"city": "Oslo"}'},
            {"type": "function_call_output", "call_id": "c", "output": "rain"},
        ],
    )
    assert prompt_of(server) == (
        f"<|im|>system\nBe kind.</s><|im|>user\nWeather in Oslo?</s><|im|>assistant\nLet me see.\n{CALL}</s>"
        "<|im|>user\n<tool_response>\nrain\n</tool_response></s><|im|>assistant\n"
    )


def test_a_streams_events_come_in_order_and_make_the_whole(client: Any) -> None:
    events = list(client.responses.create(model="tiny", input="Hi", stream=True))
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 2 and kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    final = events[-1].response
    assert "".join(event.delta for event in deltas) == final.output_text == "Hello, world!"
    assert {event.item_id for event in deltas} == {final.output[0].id} and final.usage.output_tokens > 0
    assert events[0].response.status == "in_progress" and events[0].response.id == final.id


def test_a_call_is_an_item_of_its_own(checkpoint: Checkpoint) -> None:
    with served(checkpoint, Script(f"Let me see. {CALL}")) as running:
        client = client_of(running)
        first = client.responses.create(model="tiny", input="Weather?", tools=[WEATHER])
        message, call = first.output
        assert (message.content[0].text, call.type) == ("Let me see.", "function_call")
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oslo"})
        kinds = [event.type for event in client.responses.create(
            model="tiny", input="Weather?", tools=[WEATHER], stream=True)]  # fmt: skip
        assert kinds[-6:] == [
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        client.responses.create(model="tiny", input=[result], previous_response_id=first.id)
        assert prompt_of(running).endswith(
            f"assistant\nLet me see.\n{CALL}</s><|im|>user\n<tool_response>\nrain\n</tool_response></s>"
            "<|im|>assistant\n"
        )


def test_a_response_is_continued_by_its_id(client: Any, server: Served) -> None:
    first = client.responses.create(model="tiny", input="Hi", instructions="Be brief.")
    second = client.responses.create(model="tiny", input="And?", previous_response_id=first.id, stream=True)
    final = list(second)[-1].response
    turns = "<|im|>user\nHi</s><|im|>assistant\nHello, world!</s><|im|>user\nAnd?</s><|im|>assistant\n"
    assert prompt_of(server) == turns and final.previous_response_id == first.id
    client.responses.create(model="tiny", input="So?", previous_response_id=final.id)
    assert prompt_of(server).startswith(turns + "Hello, world!</s><|im|>user\nSo?")
    assert client.responses.retrieve(first.id).output_text == "Hello, world!"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=f"there is no response '{first.id}' here; it was not stored, or"):
        client.responses.create(model="tiny", input="x", previous_response_id=first.id)
    unkept = client.responses.create(model="tiny", input="Hi", store=False)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client.responses.retrieve(unkept.id)


def test_another_key_does_not_find_a_response(checkpoint: Checkpoint) -> None:
    with served(checkpoint, keys={"me": "k" * 20, "you": "y" * 20}) as running:
        reply = client_of(running, "k" * 20).responses.create(model="tiny", input="Hi")
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            client_of(running, "y" * 20).responses.retrieve(reply.id)


def test_a_limit_makes_a_response_incomplete(client: Any) -> None:
    reply = client.responses.create(model="tiny", input="Hi", max_output_tokens=1)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = list(client.responses.create(model="tiny", input="Hi", max_output_tokens=1, stream=True))
    assert events[-1].type == "response.incomplete" and events[-1].response.status == "incomplete"


def test_a_reply_follows_its_schema(client: Any) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    text = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
    reply = client.responses.create(model="tiny", input="Hi", text=text)
    assert isinstance(json.loads(reply.output_text)["ok"], bool)
    assert reply.text.format.name == "answer"


def test_an_engine_that_fails_ends_the_stream_with_that_event(checkpoint: Checkpoint) -> None:
    with served(checkpoint, Script("Hel", error="out of memory")) as running:
        events = list(client_of(running).responses.create(model="tiny", input="Hi", stream=True))
        assert events[-1].type == "response.failed"
        assert (events[-1].response.status, events[-1].response.error.message) == ("failed", "out of memory")


BAD_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "'input' is empty; give a text or at least one item"),
    ({"input": ""}, "'input' is empty"),
    ({"input": [{"role": "boss", "content": "x"}]}, "invalid 'input.0.role'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "invalid 'input.0.content.0.t"),
    ({"input": "x" * 3000}, "but the context holds 2048"),
    ({"max_output_tokens": 0}, "invalid 'max_output_tokens'"),
    ({"messages": []}, "unknown parameter 'messages'"),
    ({"background": True}, "'background' is not supported; leave it out"),
    ({"tools": [{"type": "web_search"}]}, "invalid 'tools.0"),
    ({"tool_choice": "required"}, "'tool_choice' needs 'tools'"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "blob"}}}}, "the JSON schema cannot"),
    ({"previous_response_id": "resp_0"}, "there is no response 'resp_0' here"),
    ({"reasoning": {"effort": "low"}}, "has no variable 'reasoning_effort'"),
]


@pytest.mark.parametrize(
    ("wrong", "message"), BAD_RESPONSES, ids=[json.dumps(wrong)[:50] for wrong, _ in BAD_RESPONSES]
)
def test_a_wrong_request_is_refused_by_name(client: Any, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.responses.create(model="tiny", extra_body={"input": "Hi", **wrong})
    assert caught.value.status_code == (404 if "previous_response_id" in wrong else 400)
    assert message in caught.value.body["message"]


def test_the_templates_own_form_of_calls_is_used(tmp_path: Path) -> None:
    with served(text_checkpoint(tmp_path, HERMES), Script(CALL)) as running:
        choice = {"type": "function", "name": "get_weather"}
        reply = client_of(running).responses.create(model="tiny", input="W", tools=[WEATHER], tool_choice=choice)
        assert [item.type for item in reply.output] == ["function_call"]


def test_responses_are_kept_within_a_number_and_a_size() -> None:
    kept = KeptResponses(most=3, characters=2000)
    for number in range(5):
        kept.keep("me", str(number), [Message(role="user", content="Hi")], {"id": number})
        if number < 3:
            kept.find("me", "0")
    assert [number for number in range(5) if _is_kept(kept, str(number))] == [0, 3, 4]
    kept.keep("me", "5", [Message(role="user", content="x" * 1500)], {})
    assert [number for number in range(6) if _is_kept(kept, str(number))] == [3, 4, 5]
    kept.keep("me", "6", [Message(role="user", content="x" * 3000)], {})
    assert not any(_is_kept(kept, str(number)) for number in range(7))


def _is_kept(kept: KeptResponses, identity: str) -> bool:
    try:
        kept.find("me", identity)
    except APIError:
        return False
    return True
