"""The interactive chat: its commands, what Ctrl-C does, and that it works in a real terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from drawn import drawn
from perfetto_trace import PerfettoTrace
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from tiny_llms import save_letters, tokenizers, transformers
from typer.testing import CliRunner

from npu_compiler.errors import InputError, NPUError
from npu_sim.cli import app
from npu_sim.commands.chat import HELP, chat_in_terminal, speed
from npu_sim.llm import Conversation, GenerationStats, LanguageModel, encode_chat, load_checkpoint

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{% endfor %}z"
CACHE = 64
LONG_CACHE = 16384  # a reply that fills it takes many seconds


pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 whose tokens are letters and that never ends by itself, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("letters")
    letters = save_letters(folder, LONG_CACHE)
    letters.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    letters.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=letters, chat_template=TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    return LanguageModel(load_checkpoint(folder), device="cpu", cache_length=CACHE, chunk=8)


class Letters:
    """A stand-in for a tokenizer: a token per character."""

    chat_template = TEMPLATE

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        return "".join(message["content"] for message in messages)

    def encode(self, text: str, **options: Any) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return "".join(map(chr, ids))


class Parrot:
    """A stand-in for a language model that answers with the prompt; `at` is called before each token with its index."""

    checkpoint = SimpleNamespace(name="parrot", tokenizer=Letters())
    cache_length = 40

    def __init__(self, at: Callable[[int], None] = lambda index: None) -> None:
        self._at = at

    def generate(self, prompt: list[int], limit: int | None, sampler: Any) -> Any:
        def run() -> Iterator[int]:
            for index, token in enumerate(prompt):
                self._at(index)
                yield token

        class Tokens(Iterator[int]):
            stats = GenerationStats(prompt_tokens=len(prompt), finish_reason="stop")
            tokens = run()

            def __next__(self) -> int:
                return next(self.tokens)

        return Tokens()


def typed(conversation: Conversation, keys: str) -> None:
    """Run a chat in which the user types these keys; the last ones must leave it."""
    with create_pipe_input() as keyboard, create_app_session(input=keyboard):
        keyboard.send_text(keys)
        chat_in_terminal(conversation, "a stand-in")


@pytest.mark.parametrize("way_out", ["/bye\r", "\x04"], ids=["bye", "ctrl-d"])
def test_the_greeting_names_the_model_the_device_and_the_way_out(
    way_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(Parrot())  # type: ignore[arg-type]
    typed(conversation, way_out)
    greeting = capsys.readouterr().err.splitlines()[0]
    assert greeting == ("parrot on a stand-in. Type a message; /help lists the commands, /bye or Ctrl-D ends the chat.")


def test_lines_are_edited(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(Parrot())  # type: ignore[arg-type]
    left, delete, start = "\x1b[D", "\x7f", "\x01"
    typed(conversation, f"eox{delete}{left}ll{start}h\r/bye\r")
    assert conversation.messages[0]["content"] == "hello"
    assert "hello\n" in capsys.readouterr().out


def test_help_lists_every_command_and_an_unknown_one_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(Parrot())  # type: ignore[arg-type]
    typed(conversation, "/help\r/quit now\r/byebye\r /etc/hosts\r/bye\r")
    shown = capsys.readouterr().err
    assert all(f"{name}  " in shown and text in shown for name, text in HELP.items())
    for line in ("/quit now", "/byebye"):
        assert f"there is no command '{line}'; the commands are /help, /reset, /save FILE, /bye" in shown
    assert conversation.messages[0]["content"] == "/etc/hosts", "a line with a space before the slash is a message"


def test_reset_forgets_all_but_the_system_message(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(Parrot(), system="S")  # type: ignore[arg-type]
    typed(conversation, "one\r/reset\rtwo\r/bye\r")
    assert [m["content"] for m in conversation.messages] == ["S", "two", "Stwo"]
    assert "the conversation is forgotten" in capsys.readouterr().err


def test_save_writes_markdown_or_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    conversation = Conversation(Parrot(), system="S")  # type: ignore[arg-type]
    typed(conversation, "ö\r/save chat.md\r/save chat.json\r/save\r/save no/such.md\r/save .\r/bye\r")
    assert Path("chat.md").read_text("utf-8") == (
        "# Conversation with parrot\n\n## System\n\nS\n\n## User\n\nö\n\n## Assistant\n\nSö\n"
    )
    saved = json.loads(Path("chat.json").read_text("utf-8"))
    assert saved == {"model": "parrot", "messages": conversation.messages}
    shown = capsys.readouterr().err
    assert "3 messages written to chat.md" in shown and "give the name of a file" in shown
    assert "error: cannot write 'no/such.md': No such file or directory" in shown
    assert "error: cannot write '.': Is a directory" in shown


def test_ctrl_c_at_the_prompt_clears_the_line_and_says_how_to_leave(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(Parrot())  # type: ignore[arg-type]
    typed(conversation, "not this\x03this\r/bye\r")
    assert [m["content"] for m in conversation.messages] == ["this", "this"]
    assert "/bye or Ctrl-D ends the chat" in capsys.readouterr().err.splitlines()


def test_ctrl_c_stops_the_reply_and_keeps_its_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(Parrot(lambda index: signal.raise_signal(signal.SIGINT) if index == 2 else None))  # type: ignore[arg-type]
    before = signal.getsignal(signal.SIGINT)
    typed(conversation, "hello\r/bye\r")
    assert conversation.messages == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hel"}]
    shown = capsys.readouterr()
    assert "\r\nhel\n" in shown.out and ", stopped" in shown.err
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_the_program() -> None:
    def press_twice(index: int) -> None:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.01)  # or Python may handle both at once
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            typed(Conversation(Parrot(press_twice)), "hello\r/bye\r")  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_conversation_longer_than_the_cache_is_refused_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(Parrot())  # type: ignore[arg-type]
    typed(conversation, f"one\r{'x' * 41}\r/bye\r")
    assert [m["content"] for m in conversation.messages] == ["one", "one"]
    shown = capsys.readouterr().err
    assert "error: the prompt has 47 tokens, but the KV cache holds 40; choose a larger cache_length" in shown
    assert "--cache-length" in shown and "/reset forgets the conversation" in shown


def test_a_failing_reply_does_not_end_the_chat(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(index: int) -> None:
        if index == 3:
            raise NPUError("the logits are not finite")

    conversation = Conversation(Parrot(fail))  # type: ignore[arg-type]
    typed(conversation, "ab\rabcd\r/bye\r")
    assert [m["content"] for m in conversation.messages] == ["ab", "ab", "abcd", "aba"]
    assert "error: the logits are not finite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stats", "line"),
    [
        (
            GenerationStats(30, 20, 9, 8, prefill_seconds=0.5, decode_seconds=2),
            "10 prompt tokens at 20.0/s, 20 reused, 9 new tokens at 4.0/s",
        ),
        (GenerationStats(1, 0, 1, 0, prefill_seconds=0.5), "1 prompt token at 2.0/s, 1 new token"),
    ],
)
def test_the_speed_counts_computed_and_reused_tokens_apart(stats: GenerationStats, line: str) -> None:
    assert speed(stats) == line


def test_after_a_stopped_reply_the_next_one_is_that_of_the_same_conversation(
    folder: Path, model: LanguageModel
) -> None:
    conversation = Conversation(model, max_new_tokens=12)
    pieces = conversation.ask("bcd")
    beginning = "".join(next(pieces) for _ in range(5))
    pieces.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": beginning}
    prompt = encode_chat(model.checkpoint, [*conversation.messages, {"role": "user", "content": "ef"}])
    reply = "".join(conversation.ask("ef"))
    assert conversation.stats.prompt_tokens == len(prompt)
    assert conversation.stats.reused_tokens > 0
    fresh = LanguageModel(load_checkpoint(folder), device="cpu", cache_length=CACHE, chunk=8)
    expected = list(fresh.generate(prompt, 12))
    assert reply == model.checkpoint.tokenizer.decode(expected)


def test_a_reply_that_fills_the_cache_is_told_from_one_of_the_wanted_length(model: LanguageModel) -> None:
    short, long = Conversation(model, max_new_tokens=3), Conversation(model)
    assert len("".join(short.ask("b"))) == 3 and not short.is_full
    assert "".join(long.ask("b")) and long.is_full
    with pytest.raises(InputError, match=r"the KV cache holds 64; choose a larger cache_length \(--cache-length\)"):
        list(long.ask("c"))


def generate(folder: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["generate", str(folder), "--device", "cpu", *options], prog_name="npu-sim")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-p", "hello", "--cache-length", "5"], "the prompt has 7 tokens, but the KV cache holds 5"),
        (["-p", "hello", "--cache-length", "4", "--no-chat"], "the prompt has 5 tokens, but the KV cache holds 4"),
        (["-p", "hello", "--cache-length", "99999"], f"was trained for, {LONG_CACHE} (--cache-length)"),
        (["-p", "x" * 2100], "the prompt has 2102 tokens, but the KV cache holds 2048"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused_before_the_model_is_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    def compiled(*args: Any, **options: Any) -> None:
        raise AssertionError("the model was compiled")

    monkeypatch.setattr("npu_sim.llm.LanguageModel", compiled)
    if "--cache-length" in options:
        monkeypatch.setattr("npu_runtime.Device", compiled)
    result = generate(folder, *options)
    assert result.exit_code == 2 and message in result.stderr and "--cache-length" in result.stderr


def test_without_a_chat_template_the_model_is_not_compiled(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    monkeypatch.setattr("npu_sim.llm.LanguageModel", None)
    result = generate(tmp_path, "-p", "hello")
    assert result.exit_code == 2 and "has no chat template; use complete() (--no-chat)" in result.stderr


def test_generate_says_when_the_cache_ends_the_text(folder: Path) -> None:
    full, short = (generate(folder, "-p", "hello", "--cache-length", "16", *more) for more in ([], ["-n", "3"]))
    assert "the text ends here because the KV cache is full; a larger --cache-length holds more" in full.stderr
    assert "full" not in short.stderr and re.fullmatch(
        r"7 prompt tokens at [\d.]+/s, 3 new tokens at [\d.]+/s\n", short.stderr
    )


def test_generate_says_and_traces_how_long_each_token_took(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    result = generate(folder, "-p", "hello", "-n", "4", "--json", "--trace", str(path))
    facts = json.loads(result.stdout)
    assert facts["trace"] == str(path) and facts["new_tokens"] == 4 == len(facts["token_seconds"]) + 1
    assert facts["prefill_seconds"] == facts["first_token_seconds"] > 0
    assert sum(facts["token_seconds"]) <= facts["decode_seconds"]
    assert facts["decode_tokens_per_second"] == pytest.approx(3 / facts["decode_seconds"])
    trace = PerfettoTrace(path)
    assert trace.problems() == []
    found = [name for (name,) in trace.rows("select name from slice order by ts, dur desc")]
    assert found[:2] == [f"open {folder}", "prepare the programs and weights"] and found[2] == "prefill"
    assert found[3:-3] and all(name.startswith("prefill ") for name in found[3:-3])
    assert found[-3:] == ["token 2", "token 3", "token 4"]


class Terminal:
    """A program in a pseudo terminal."""

    def __init__(self, *command: str, cwd: Path) -> None:
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (40, 150))
        self._file = ours
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env=terminal_environment(),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C becomes SIGINT
        )
        os.close(theirs)
        self._seen = ""

    def send(self, keys: str) -> None:
        os.write(self._file, keys.encode())

    def expect(self, pattern: str) -> str:
        """Wait until what was shown since the last call has the pattern; returns the text up to its end."""
        deadline = time.monotonic() + 120
        while not (match := re.search(pattern, plain(self._seen))):
            ready, _, _ = select.select([self._file], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {pattern!r} in {plain(self._seen)[-2000:]!r}"
            try:
                self._seen += os.read(self._file, 65536).decode(errors="replace")
            except OSError:  # Linux: the program has closed the terminal
                raise AssertionError(f"the program ended without {pattern!r}: {plain(self._seen)[-2000:]!r}") from None
        text = plain(self._seen)
        self._seen = text[match.end() :]
        return text[: match.end()]

    def wait(self) -> int:
        return self.process.wait(timeout=120)

    def close(self) -> None:
        os.close(self._file)
        self.process.kill()
        self.process.wait()


def terminal_environment() -> dict[str, str]:
    """PyTorch runs the kernels, as the native ones would have to be compiled into the tests' own cache."""
    settings = {"PYTHONPATH": str(ROOT), "NPU_SIM_NATIVE": "0", "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}
    return {**os.environ, **settings}


def plain(text: str) -> str:
    """Return a text without its escape sequences."""
    return re.sub(r"\x1b(\[[0-9;?]*[a-zA-Z]|[=>])", "", text)


def chat_command(folder: Path) -> list[str]:
    options = ["--device", "cpu", "--cache-length", str(LONG_CACHE)]
    return [sys.executable, "-m", "npu_sim.cli", "generate", str(folder), *options]


@pytest.mark.parametrize("option", drawn([["--trace", "trace.json"], ["--json"], ["--no-chat"]], 1 / 3))
def test_a_chat_in_a_terminal_has_no_single_result(folder: Path, tmp_path: Path, option: list[str]) -> None:
    terminal = Terminal(*chat_command(folder), *option, cwd=tmp_path)
    try:
        terminal.expect("--no-chat, --json and --trace need a prompt: give it with --prompt or on standard input")
        assert terminal.wait() == 2
    finally:
        terminal.close()


def test_chat_in_a_terminal(folder: Path, tmp_path: Path) -> None:
    terminal = Terminal(*chat_command(folder), cwd=tmp_path)
    try:
        terminal.expect(rf"{folder.name} on cpu \(.+\)\. Type a message; /help lists the commands, /bye or Ctrl-D ends")
        terminal.expect(">")
        terminal.send("hello\r")
        terminal.expect(r"[\r\n][a-z]{40}")
        terminal.send("\x03")
        terminal.expect(r"7 prompt tokens at [\d.]+/s, \d+ new tokens at [\d.]+/s, stopped")
        terminal.expect(">")
        terminal.send("half a line\x03")
        terminal.expect("/bye or Ctrl-D ends the chat")
        terminal.expect(">")
        terminal.send("/save chat.json\r")
        terminal.expect("2 messages written to chat.json")
        terminal.send("\x1b[A\x1b[A\r")  # up twice: hello again
        terminal.expect(r"[\r\n][a-z]{40}")
        terminal.send("\x03")
        terminal.expect(r"\d+ prompt tokens at [\d.]+/s, \d+ reused, \d+ new tokens at [\d.]+/s, stopped")
        terminal.expect(">")
        terminal.send("\x04")
        assert terminal.wait() == 0
    finally:
        terminal.close()
    saved = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [m["role"] for m in saved] == ["user", "assistant"] and saved[0]["content"] == "hello"
    assert len(saved[1]["content"]) >= 40


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_chat_in_tmux(folder: Path, tmp_path: Path) -> None:
    def tmux(*arguments: str) -> str:
        command = ["tmux", "-S", str(tmp_path / "tmux"), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=terminal_environment()).stdout

    def expect(pattern: str) -> None:
        deadline = time.monotonic() + 120
        while not re.search(pattern, screen := tmux("capture-pane", "-p", "-J", "-S", "-", "-t", "chat")):
            assert time.monotonic() < deadline, f"no {pattern!r} in {screen!r}"
            time.sleep(0.1)

    command = f"{shlex.join(chat_command(folder))}; echo exit code $?; sleep 600"
    tmux("-f", "/dev/null", "new-session", "-d", "-x", "150", "-y", "40", "-s", "chat", "-c", str(tmp_path), command)
    try:
        expect("Type a message; /help lists the commands")
        expect(r"(?m)^> *$")
        tmux("send-keys", "-t", "chat", "hello", "Enter")
        expect(r"> hello\n[a-z]{40}")
        tmux("send-keys", "-t", "chat", "C-c")
        expect(r"new tokens at [\d.]+/s, stopped")
        tmux("send-keys", "-t", "chat", "/bye", "Enter")
        expect("exit code 0")
    finally:
        tmux("kill-server")
