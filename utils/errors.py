"""The exception that separates faults of a task from faults of this project, and the exit for a missing package."""

import sys

PROCESS_DIED = "its process has died"
MAX_OBS_DIM = 1_000_000  # numbers of an observation; a first layer of 256 units then takes a gigabyte


class TaskError(Exception):
    """An exception raised by the task's own code: its constructor, `reset` or `step`."""


def describe_error(error: BaseException) -> str:
    """The type and the text of an exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def task_exception(error: BaseException | None) -> BaseException | None:
    """The exception that the task's own code raised; None if the fault was found by this project, or in a process."""
    if str(error).endswith(PROCESS_DIED):  # the cause is of the pipe to it
        return None
    while isinstance(error, TaskError) or str(error).startswith("environment "):  # what the project made of it
        error = error.__cause__ if error is not None else None
    return error


class PartLost(Exception):
    """A process of the run has died with data that no other one has: the run goes on from its last checkpoint."""


def missing_package(what: str, error: ModuleNotFoundError) -> SystemExit:
    """Prints one sentence about a package that is not installed; returns what the caller raises, with status 2."""
    package = str(error.name).partition(".")[0]
    print(f"error: {what} needs the package {package}: pip install {package}", file=sys.stderr)
    return SystemExit(2)
