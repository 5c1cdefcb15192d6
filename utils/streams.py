"""The flag --streams of `variants/sac_rewards.py`: names, strengths and discounts of reward streams."""

import math
from collections.abc import Collection
from typing import Any

from utils.run import fail


def parse_streams(args: Any, intrinsic: Collection[str]) -> dict[str, tuple[float, float]]:
    """Strength and discount of each stream, first those of the extrinsic one; exits with one sentence.

    `intrinsic` are the names of the streams that there are besides.
    """
    known = ("extrinsic", *intrinsic)
    streams = dict[str, tuple[float, float]]()
    for word in str(args.streams).split(","):
        defaults = "1", str(args.gamma)
        try:
            name, *numbers = *word.split(":"), *defaults[word.count(":") :]  # those that the word does not have
            strength, gamma = map(float, numbers)
            is_sound = name in known and name not in streams and 0.0 <= strength < math.inf
            if not is_sound or not 0.0 <= gamma <= 1.0 or (gamma > 0.999999 and name != "extrinsic"):
                raise ValueError  # the others' returns do not end: without a discount they have no finite value
        except ValueError:
            takes = f"each of {', '.join(known)} once, with commas; a gamma is at most 0.999999, or 1 for extrinsic"
            fail(f"--streams takes NAME, NAME:STRENGTH or NAME:STRENGTH:GAMMA, {takes}; not {word}")
        streams[name] = strength, gamma
    return {"extrinsic": (0.0, args.gamma)} | streams
