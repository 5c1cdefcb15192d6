"""Draws `sumo.png` beside this file: six frames of one game of charge (red) against centre (blue)."""

import sys
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))

from utils.games import Sumo
from utils.video import film_strip

env = Sumo(num_games=1)
env.restarts = False  # the last frame shows the end of the game
env.reset(seed=3)
frames, over = [env.render()], False
while not over:
    over = bool(env.step([env.scripted_actions("charge", team=0), env.scripted_actions("centre", team=1)]).over[0])
    frames.append(env.render())

Image.fromarray(film_strip(frames)).quantize(64).save(Path(__file__).with_suffix(".png"), optimize=True)
