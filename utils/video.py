"""Pictures of a game: a video, and a strip of a few frames as one picture."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

MAX_FRAMES = 2_000  # of a video; one of 600 x 600 pixels takes a megabyte of memory


def write_video(path: Path, frames: Sequence[np.ndarray], fps: float) -> None:
    """Writes pictures (height, width, 3) uint8, all of one size, as an H.264 video that shows each of them once.

    A picture of odd size is padded by a row or a column: most players take even sizes only.
    """
    # moviepy's ImageSequenceClip looks frames up by their time. Rounding then repeats some, and drops the last one.
    from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter

    height, width = frames[0].shape[:2]
    padding = (0, height % 2), (0, width % 2), (0, 0)
    with FFMPEG_VideoWriter(str(path), (width + width % 2, height + height % 2), fps) as writer:
        for frame in frames:
            writer.write_frame(np.pad(frame, padding, mode="edge"))


def film_strip(frames: Sequence[np.ndarray], count: int = 6, size: int = 200, gap: int = 8) -> np.ndarray:
    """`count` equally spaced pictures side by side, with the first and the last one; all of them if there are fewer.

    Takes pictures (height, width, 3) uint8 of one size. They are scaled so that the longer side has `size` pixels, and
    are `gap` white pixels apart. Returns one picture of the same kind.
    """
    from PIL import Image

    chosen = np.linspace(0, len(frames) - 1, min(count, len(frames))).round().astype(int)
    height, width = (max(1, round(size * side / max(frames[0].shape[:2]))) for side in frames[0].shape[:2])
    strip = np.full((height, len(chosen) * (width + gap) - gap, 3), 255, dtype=np.uint8)
    for left, frame in zip(range(0, strip.shape[1], width + gap), chosen, strict=True):
        picture = Image.fromarray(frames[frame]).resize((width, height), Image.Resampling.LANCZOS)
        strip[:, left : left + width] = np.asarray(picture)
    return strip
