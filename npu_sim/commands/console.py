"""Terminal output and exit codes shared by all commands: results go to stdout, progress and errors to stderr."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TextIO

import typer
from typer.core import TyperGroup

EXIT_DIFFERS = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

# Modules that log what takes a user's time but once on a machine: compiling kernels, or a program for longer prompts.
_WORTH_A_WORD = ("npu_runtime.cpu.backend", "npu_runtime.cpu.native.build", "npu_sim.llm.contiguous_model")

Progress = Callable[[int, int | None], None]


class ErrorReporting(TyperGroup):
    """A command group that reports an exception in one sentence on stderr (exit code 2), and Ctrl-C (exit code 130).

    `--debug`, before or after the command's name, also prints the traceback.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.obj = {"debug": "--debug" in args[:end]}
        return super().parse_args(ctx, [arg for i, arg in enumerate(args) if arg != "--debug" or i > end])

    def invoke(self, ctx: Any) -> Any:
        with _Interrupts() as interrupts, log_as_notes(*_WORTH_A_WORD), _warnings_as_notes():
            try:
                result = super().invoke(ctx)
            except BrokenPipeError:
                raise
            except (Exception, KeyboardInterrupt) as error:
                if not interrupts.seen and not isinstance(error, KeyboardInterrupt):
                    _report(error, with_traceback=ctx.obj["debug"])
                interrupts.seen = True
            if interrupts.seen:
                print("interrupted", file=sys.stderr)
                # After KeyboardInterrupt has passed through an exec(), CPython sets a flag that makes the process kill
                # itself with SIGINT when it ends. Another exec() clears the flag.
                exec("")
                raise typer.Exit(EXIT_INTERRUPTED)
            return result


class _Interrupts:
    """A context that records Ctrl-C and raises `KeyboardInterrupt` repeatedly until the command ends.

    One exception is not enough: libraries replace it by their own or suppress it, for example around an optional
    import, in a finalizer, or in a callback from C.

    Attributes:
        latest: The instance of the command that is running or ran last. None before the first command.
        seen: Whether Ctrl-C was pressed.
    """

    _GRACE_PERIOD = 0.4  # seconds between repeated KeyboardInterrupts
    latest: _Interrupts | None = None

    def __init__(self) -> None:
        _Interrupts.latest = self
        self.seen = False
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._interrupt) for number in self._signals()}
        return self

    def __exit__(self, *_: object) -> None:
        if self._handlers and hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @staticmethod
    def _signals() -> list[signal.Signals]:
        return [signal.SIGINT, *([signal.SIGALRM] if hasattr(signal, "setitimer") else [])]

    def _interrupt(self, *_: object) -> None:
        self.seen = True
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, self._GRACE_PERIOD)
        raise KeyboardInterrupt


@contextmanager
def stop_on_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Catch the first Ctrl-C within this context; yields a function that returns True once Ctrl-C was pressed.

    A second Ctrl-C has the effect that it has outside the context. Only for the main thread.
    """
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            signal.signal(number, before)
            signal.raise_signal(number)
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _report(error: Exception, *, with_traceback: bool) -> NoReturn:
    message = describe_error(error)
    if message is None:
        raise error
    if with_traceback:
        traceback.print_exc()
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(EXIT_ERROR) from None


def describe_error(error: Exception) -> str | None:
    """Return the message for an exception; None for exceptions that Typer reports itself (wrong usage, exit)."""
    from npu_compiler.errors import NPUError
    from npu_compiler.installing import missing_package

    if type(error).__module__.startswith(("typer", "click")):
        return None
    if isinstance(error, NPUError):
        return str(error)
    if isinstance(error, MemoryError):
        return "out of memory"
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot use '{error.filename}': {error.strerror}"
    if isinstance(error, ModuleNotFoundError) and (reason := missing_package(error)):
        return reason
    text = str(error).strip().splitlines()
    return f"unexpected {type(error).__name__}: {text[0] if text else 'no message'} (use --debug for the traceback)"


def print_json(data: Any) -> None:
    """Print a value to stdout as JSON; infinities and NaN, which JSON lacks, become null."""
    typer.echo(json.dumps(_plain(data), indent=2, ensure_ascii=False, default=str))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def note(message: str) -> None:
    """Print a remark to stderr, where it does not mix with results."""
    print(message, file=sys.stderr)


@contextmanager
def concerning(option: str) -> Iterator[None]:
    """Append the name of a command-line option to the message of an `InputError` that is raised within this context.

    Library functions raise errors that do not know the option's name.
    """
    from npu_compiler.errors import InputError

    try:
        yield
    except InputError as error:
        raise InputError(f"{error} ({option})") from error


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if _Interrupts.latest is None or not _Interrupts.latest.seen:  # a thread may work on for a moment after Ctrl-C
            note(record.getMessage())


@contextmanager
def log_as_notes(*names: str) -> Iterator[None]:
    """Print to stderr, within this context, what the named modules log at level INFO and above."""
    loggers, handler = [logging.getLogger(name) for name in names], _Notes(logging.INFO)
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Print warnings within this context as plain messages, without the file and line of the code that gives them."""
    show = warnings.showwarning

    def as_note(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if category is UserWarning:
            note(f"warning: {message}")
        else:
            show(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.showwarning = as_note
        yield


class _StepLine:
    """The text beside a spinner or bar: a message and, while one is running, the background work that may delay it."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __rich__(self) -> str:
        from rich.markup import escape

        from npu_runtime.background import current_work

        work = current_work()
        return escape(self._message if work is None else f"{self._message} ({work})")


@contextmanager
def step(message: str) -> Iterator[None]:
    """Show a spinner on stderr during a step of unknown length; nothing is shown if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(_StepLine(message)):
        yield


@contextmanager
def progress(message: str) -> Iterator[Progress]:
    """Show a progress bar on stderr if that is a terminal; yields a function to call with (done, total or None).

    Like `step`, the bar also names background work that the command may be waiting for.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, RenderableColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (RenderableColumn(_StepLine(message)), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(message, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
