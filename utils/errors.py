"""The exception that separates faults of a task from faults of this project, and the exit for a missing package."""

import sys

MAX_OBS_DIM = 1_000_000  # numbers of an observation; a first layer of 256 units then takes a gigabyte


class TaskError(Exception):
    """An exception raised by the task's own code: its constructor, `reset` or `step`."""


class PartLost(Exception):
    """A process of the run has died with data that no other one has: the run goes on from its last checkpoint."""


def missing_package(what: str, error: ModuleNotFoundError) -> SystemExit:
    """Prints one sentence about a package that is not installed; returns what the caller raises, with status 2."""
    package = str(error.name).partition(".")[0]
    print(f"error: {what} needs the package {package}: pip install {package}", file=sys.stderr)
    return SystemExit(2)
