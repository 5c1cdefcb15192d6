"""What produced the README's numbers."""

import sys
from typing import NoReturn


def fail(message: str) -> NoReturn:
    """Ends the program: one sentence on standard error, exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
