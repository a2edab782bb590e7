"""The ``crisp`` command: how everything that goes wrong is said.

The commands are imported inside, so that Ctrl-C is answered from the first moment on.
"""

from __future__ import annotations

import difflib
import io
import os
import shlex
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from crisp.errors import CrispError, FormerNameWarning, InvariantError

USAGE, FAULT, INTERRUPTED, BROKEN_PIPE, TERMINATED = 2, 70, 130, 141, 143  # exit codes
_LONGEST = 300  # characters of a library's message


class Terminated(KeyboardInterrupt):
    """The exception that SIGTERM raises; it ends a command as Ctrl-C does."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0, or 2 after a user's mistake, told in one line."""
    if arguments is None:
        _use_utf8()
    arguments_given = list(sys.argv[1:] if arguments is None else arguments)
    closed = _settle_streams()
    code = _say("error: standard output is closed", USAGE) if closed else _guarded(arguments_given)
    try:
        sys.stdout.flush()
    except OSError as error:
        _drop(sys.stdout)
        if isinstance(error, BrokenPipeError):  # whoever reads has what they wanted
            code = BROKEN_PIPE
        elif code == 0:  # else it has been said
            code = _say(f"error: standard output: {error.strerror or error}", USAGE)
    sys.exit(code)


def _use_utf8() -> None:
    """Start Python anew in UTF-8 mode, where the locale cannot spell a file's name that is UTF-8.

    Under such a locale Python hands names on that other libraries can neither open nor print.
    """
    if sys.flags.utf8_mode or sys.getfilesystemencoding().lower() == "utf-8":
        return
    encoded = [os.fsencode(item) for item in sys.argv]
    if all(item.isascii() for item in encoded):
        return
    with suppress(UnicodeDecodeError, OSError):
        for item in encoded:
            item.decode("utf-8")
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _settle_streams() -> bool:
    """Make writing to the standard streams safe; return whether standard output is closed.

    Else the next file that is opened would take the number of a closed one and get what libraries
    print, and print() to a closed standard error would write to standard output.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    closed = [name for name in ("stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:
        setattr(sys, name, os.fdopen(1 if name == "stdout" else 2, "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):  # where it takes no – there shall be a ?
        sys.stdout.reconfigure(errors="replace")
    return "stdout" in closed


def _drop(stream: TextIO) -> None:
    """Discard what a stream could not write, so that Python ends quietly."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _guarded(arguments_given: list[str]) -> int:
    """Run a command and report whatever goes wrong; return the exit code."""
    debug = arguments_given[:1] == ["--debug"]
    command_line = arguments_given[1:] if debug else arguments_given
    try:
        with _termination_raised():
            return _run(command_line)
    except BaseException as error:
        if debug:
            traceback.print_exception(error)
        return _explain(error, command_line)


def _explain(error: BaseException, command_line: list[str]) -> int:
    """Say in one line what went wrong; return the exit code."""
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, KeyboardInterrupt):
        error = error.__cause__  # Python 3.11 says so if a class was being made
    if isinstance(error, KeyboardInterrupt):
        return _interrupted(error)
    if isinstance(error, BrokenPipeError):
        _drop(sys.stdout)
        return BROKEN_PIPE
    if isinstance(error, CrispError):
        return _say(_noted(f"error: {error}", error), USAGE)
    from crisp.extensions import plugin_fault

    fault = plugin_fault(error)
    if fault is not None:
        return _say(f"error: {fault}", USAGE)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else _file_at_fault(error)
        return _say(f"error: {where}{error.strerror or error}", USAGE)
    if isinstance(error, MemoryError):
        where = _file_at_fault(error)
        return _say(f"error: {where}memory is too little: {error}".removesuffix(": "), USAGE)
    if isinstance(error, InvariantError):
        return _say(
            f"error: a fault of crisp, not of your input: {error}; please report it, with the "
            f"command: {shlex.join(['crisp', *command_line])}",
            FAULT,
        )
    return _unexpected(error, command_line)


def _unexpected(error: BaseException, command_line: list[str]) -> int:
    """Report an error that crisp does not know, such as a library's; return the exit code.

    Where a file was read it, and not crisp, is likely to be at fault.
    """
    where = _file_at_fault(error)
    lines = str(error).strip().splitlines()
    reason = f": {lines[0][:_LONGEST]}" if lines else ""
    return _say(
        f"error: {where}{type(error).__name__}{reason}; crisp did not expect this: please report "
        f"it, with what this prints: {shlex.join(['crisp', '--debug', *command_line])}",
        USAGE if where else FAULT,
    )


def _file_at_fault(error: BaseException) -> str:
    """Return ``FILE: `` of the file that the innermost of crisp's functions was at, if any."""
    files: list[Path] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).startswith("crisp."):
            values = frame.f_locals.values()
            files += [value for value in values if isinstance(value, Path) and value.is_file()]
    return f"{files[-1]}: " if files else ""


@contextmanager
def _termination_raised() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that nothing half-written is left."""

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # tidying up has begun
        raise Terminated

    # what is ignored, as by a parent that wants it so, stays ignored; threads handle no signals
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _interrupted(error: KeyboardInterrupt) -> int:
    """Report the interruption; return the exit code."""
    exec("")  # else Python ends by the signal itself, if that came while it executed a string
    if isinstance(error, Terminated):
        return _say(_noted("terminated", error), TERMINATED)
    return _say(_noted("interrupted", error), INTERRUPTED)


def _noted(line: str, error: BaseException) -> str:
    """Return a line, followed by the notes on what was kept or could not be tidied up."""
    return "; ".join([line, *getattr(error, "__notes__", ())])


def _run(arguments_given: list[str]) -> int:
    """Run the command that is given; return the exit code."""
    _check(arguments_given)
    import typer

    from crisp.cli.app import app

    # click's UsageError, which typer does not export
    usage_error = cast(type[Exception], typer.BadParameter.__mro__[1])
    try:
        command = typer.main.get_command(app)
        with (
            _former_names_noted(),
            command.make_context("crisp", arguments_given or ["--help"]) as context,
        ):
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except usage_error as error:
        raise CrispError(_usage(error)) from error
    return 0


@contextmanager
def _former_names_noted() -> Iterator[None]:
    """Say once what anything is called now that is asked for by a former name in the block.

    Worker processes say nothing: what they are asked for has been read here.
    """
    noted: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if not issubclass(category, FormerNameWarning):
            show_others(message, category, *where, **more)
        elif str(message) not in noted:
            noted.add(str(message))
            _say(f"note: {message}", 0)

    with warnings.catch_warnings():
        warnings.simplefilter("always", FormerNameWarning)
        show_others, warnings.showwarning = warnings.showwarning, show
        yield


def _check(arguments_given: list[str]) -> None:
    """Raise CrispError for what no option takes: nothing at all, or a name that is no text.

    What another command is given may be anything.
    """
    if arguments_given[:1] == ["energy"]:
        return
    for before, item in zip(["crisp", *arguments_given], arguments_given, strict=False):
        name, equals, value = item.partition("=")
        if not item or (name.startswith("--") and equals and not value):
            # as a path it would mean the present folder
            raise CrispError(
                f"an empty value was given after '{item or before}', expected a name, number or "
                "file"
            )
        try:
            item.encode()
        except UnicodeEncodeError as error:
            raise CrispError(f"{item!a}: is not UTF-8") from error


def _say(line: str, code: int) -> int:
    line = " ".join(line.split())
    if not line.isprintable():  # of a file's name, or out of a file
        from crisp.cli.output.words import printable

        line = printable(line)
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:  # nobody is there to be told
        _drop(sys.stderr)
    return code


def _usage(error: Any) -> str:
    """Describe a wrong command line in one line: what was found, what is near, where to read on."""
    context = error.ctx
    message = str(error.format_message()).rstrip(".")
    message = message[:1].lower() + message[1:]
    if context is None:
        return message
    if type(error).__name__ == "NoSuchOption":
        unknown = error.option_name
        option_names = [name for parameter in context.command.params for name in parameter.opts]
        nearest_names = difflib.get_close_matches(unknown, option_names, n=1, cutoff=0.5)
        hint = f"; did you mean '{nearest_names[0]}'?" if nearest_names else ";"
        message = f"unknown option '{unknown}'{hint}"
    else:
        message += ";"
    return f"{message} see '{context.command_path} --help'"
