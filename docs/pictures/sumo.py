"""Draws `sumo.png` beside this file: six frames of one game of charge (red) against centre (blue)."""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))

from utils.games import Sumo

FRAMES, SIZE, GAP = 6, 160, 8  # pictures, pixels of a side, pixels between two

env = Sumo(num_games=1)
env.restarts = False  # the last frame shows the end of the game
env.reset(seed=3)
frames, over = [env.render()], False
while not over:
    over = bool(env.step([env.scripted_actions("charge", team=0), env.scripted_actions("centre", team=1)]).over[0])
    frames.append(env.render())

strip = np.full((SIZE, FRAMES * SIZE + (FRAMES - 1) * GAP, 3), 255, dtype=np.uint8)
for i, frame in enumerate(np.linspace(0, len(frames) - 1, FRAMES).round().astype(int)):
    left = i * (SIZE + GAP)
    picture = Image.fromarray(frames[frame]).resize((SIZE, SIZE), Image.Resampling.LANCZOS)
    strip[:, left : left + SIZE] = np.asarray(picture)
Image.fromarray(strip).quantize(64).save(Path(__file__).with_suffix(".png"), optimize=True)
