"""The interactive chat of `npu-sim generate`: line editing, and commands that begin with a slash."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from npu_compiler.errors import NPUError
from npu_sim.commands.checks import check_text
from npu_sim.commands.console import note, step, stop_on_ctrl_c

if TYPE_CHECKING:
    from npu_sim.llm import Conversation, GenerationStats
    from npu_sim.llm.chat import Message

LEAVE = "/bye or Ctrl-D ends the chat"
HELP = {
    "/help": "Show this list.",
    "/reset": "Forget the conversation; a system message stays.",
    "/save FILE": "Write the conversation to a file: JSON if its name ends in .json, else Markdown.",
    "/bye": "End the chat; so does Ctrl-D.",
}
KEYS = """\
Ctrl-C stops a reply, whose beginning stays in the conversation; pressed twice, it ends the program. While you type, it
clears the line. The arrow keys bring back earlier lines, and Tab completes commands. A line that begins with a slash is
a command; put a space before it to send it as a message."""


def chat_in_terminal(conversation: Conversation, where: str) -> None:
    """Read messages from the terminal and print the model's replies until the user leaves.

    Args:
        where: Name of the device that runs the model, for the greeting.
    """
    note(f"{conversation.model.checkpoint.name} on {where}. Type a message; /help lists the commands, {LEAVE}.")
    read_line = line_editor()
    while True:
        try:
            line = read_line()
        except EOFError:
            return
        except KeyboardInterrupt:
            note(LEAVE)
            continue
        if line.startswith("/"):
            if line.strip() == "/bye":
                return
            _run_command(line, conversation)
        elif line.strip():
            _answer(line.strip(), conversation)


def line_editor() -> Callable[[], str]:
    """Return a function that reads a line from the terminal, with editing, history and completion of commands by Tab.

    That function raises `EOFError` at Ctrl-D and `KeyboardInterrupt` at Ctrl-C.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import NestedCompleter, PathCompleter
    from prompt_toolkit.output import create_output

    commands = {name.split()[0]: PathCompleter() if " " in name else None for name in HELP}
    session: PromptSession[str] = PromptSession(
        "> ",
        completer=NestedCompleter.from_nested_dict(commands),
        complete_while_typing=False,
        output=create_output(always_prefer_tty=True),
    )
    return session.prompt


def _run_command(line: str, conversation: Conversation) -> None:
    name, _, argument = line.strip().partition(" ")
    if name == "/save":
        _save(argument.strip(), conversation)
    elif argument or name not in HELP:
        note(f"there is no command '{line.strip()}'; the commands are {', '.join(HELP)}")
    elif name == "/reset":
        conversation.reset()
        note("the conversation is forgotten")
    else:
        note("\n".join(f"{command:12}{text}" for command, text in HELP.items()))
        note(KEYS)


def _save(file: str, conversation: Conversation) -> None:
    from npu_compiler.files import write_atomically

    if not file:
        note("give the name of a file, as in /save chat.md or /save chat.json")
        return
    path, name = Path(file).expanduser(), conversation.model.checkpoint.name
    as_text = _as_json if path.suffix == ".json" else _as_markdown
    try:
        write_atomically(path, as_text(name, conversation.messages).encode())
    except OSError as error:
        note(f"error: cannot write '{path}': {error.strerror or error}")
    else:
        note(f"{len(conversation.messages)} messages written to {path}")


def _as_json(model: str, messages: Sequence[Message]) -> str:
    return json.dumps({"model": model, "messages": messages}, indent=2, ensure_ascii=False) + "\n"


def _as_markdown(model: str, messages: Sequence[Message]) -> str:
    parts = [f"# Conversation with {model}", *(f"## {m['role'].capitalize()}\n\n{m['content']}" for m in messages)]
    return "\n\n".join(parts) + "\n"


def _answer(text: str, conversation: Conversation) -> None:
    try:
        check_text(text, "the message")
        with closing(conversation.ask(text)) as pieces, stop_on_ctrl_c() as stopped:
            for piece in after_prefill(pieces):
                sys.stdout.write(piece)
                sys.stdout.flush()
                if stopped():
                    break
    except NPUError as error:
        note(f"error: {error}")
        note("/reset forgets the conversation")
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    note(speed(conversation.stats) + (", stopped" if stopped() else ""))
    if conversation.is_full:
        note("the KV cache is full: /reset forgets the conversation, and a larger --cache-length holds more of it")


def after_prefill(pieces: Iterator[str]) -> Iterator[str]:
    """Pass on the pieces of a generated text, with a spinner on stderr until the first one arrives."""
    with step("reading the prompt"):
        first = next(pieces, None)
    if first is not None:
        yield first
        yield from pieces


def speed(stats: GenerationStats) -> str:
    """Return a line about a generation: tokens computed, tokens per second, and prompt tokens reused from the cache."""
    parts = [_rate(stats.prompt_tokens - stats.reused_tokens, "prompt", stats.prefill_tokens_per_second)]
    if stats.reused_tokens:
        parts.append(f"{stats.reused_tokens} reused")
    return ", ".join([*parts, _rate(stats.new_tokens, "new", stats.decode_tokens_per_second)])


def _rate(count: int, kind: str, per_second: float) -> str:
    text = f"{count} {kind} token{'' if count == 1 else 's'}"
    return f"{text} at {per_second:.1f}/s" if per_second else text
