"""The exception that separates faults of a task from faults of this project."""


class TaskError(Exception):
    """An exception raised by the task's own code: its constructor, `reset` or `step`."""
