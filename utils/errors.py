"""What training and its tools share without PyTorch: exceptions, sentences for them, whole files, output
that may close."""

import io
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

MAX_OBS_DIM = 1_000_000  # numbers of an observation; a first layer of 256 units then takes a gigabyte


class TaskError(Exception):
    """An exception raised by the task's own code: its constructor, `reset` or `step`."""


def describe_error(error: BaseException) -> str:
    """The type and the text of an exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def place_of(error: BaseException) -> str:
    """Where an exception was raised, as " (game.py, line 12)", if a file of the user is in the working folder."""
    frame = traceback.extract_tb(error.__traceback__)[-1]  # a caught exception has one
    path, is_frozen = Path(frame.filename).resolve(), frame.filename.startswith("<")  # importlib's, say
    is_library = is_frozen or "site-packages" in path.parts or path.parent == Path(__file__).resolve().parent
    return f" ({path.name}, line {frame.lineno})" if path.is_relative_to(Path.cwd()) and not is_library else ""


class PartLost(Exception):
    """A process of the run has died and is not replaced, or cannot be started. The last checkpoint can be resumed."""


def missing_package(what: str, error: ModuleNotFoundError) -> SystemExit:
    """Prints one sentence about a package that is not installed; returns what the caller raises, with status 2."""
    package = str(error.name).partition(".")[0]
    print(f"error: {what} needs the package {package}: pip install {package}", file=sys.stderr)
    return SystemExit(2)


def write_file(path: Path, contents: bytes) -> None:
    """Replaces a file atomically: after a kill or a power cut there is the old file or the new one."""
    new = path.with_name(path.name + ".new")
    try:
        with new.open("wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)  # half a file, which fills the disk
        raise


class Output:
    """A standard stream that may be closed, as by `| head -1`: later output is dropped, and the run continues."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream: TextIO = stream or open(os.devnull, "w")  # noqa: SIM115 (closed when the program ends)
        if isinstance(self.stream, io.TextIOWrapper):
            with suppress(OSError):
                self.stream.reconfigure(errors="backslashreplace")  # for letters that the terminal does not have

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Writes the text, or drops it."""
        try:
            return self.stream.write(text)
        except OSError:
            self.drop()
        return len(text)

    def flush(self) -> None:
        """Hands on what was written, or drops it."""
        try:
            self.stream.flush()
        except OSError:
            self.drop()

    def drop(self) -> None:
        """From here on everything goes nowhere."""
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def keep_printing() -> None:
    """Lets the program go on when nobody reads its output any more: from then on it is dropped."""
    for name in ("stdout", "stderr"):
        if not isinstance(getattr(sys, name), Output):
            setattr(sys, name, Output(getattr(sys, name)))
