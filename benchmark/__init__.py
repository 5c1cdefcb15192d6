"""What produced the README's numbers."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

REPOSITORY = Path(__file__).resolve().parents[1]


def fail(message: str) -> NoReturn:
    """Ends the program: one sentence on standard error, exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command line before `--`, and those after it."""
    split = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:split]), list(argv[split + 1 :])
