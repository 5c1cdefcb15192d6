"""Videos of games, and strips of their frames: each picture once, the deciding one last, the game's own speed."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import imageio.v3 as iio
import numpy as np
import pytest
import torch.nn as nn
import vector_game

import utils.run
from utils import cross_play
from utils.cross_play import Player, record_video
from utils.team_env import make_team_env
from utils.video import film_strip, write_video


@pytest.mark.parametrize("shape", [(64, 64), (63, 65), (63, 64)])
def test_a_video_has_each_picture_once(shape: tuple[int, int], tmp_path: Path) -> None:
    """As many as there were, in their order: 101 at 10 a second is where times that are rounded go wrong."""
    levels = np.random.default_rng(0).permutation(101) * 2 + 20
    frames = [np.full((*shape, 3), level, dtype=np.uint8) for level in levels]
    write_video(tmp_path / "x.mp4", frames, 10.0)
    found, meta = iio.imread(tmp_path / "x.mp4"), iio.immeta(tmp_path / "x.mp4")
    assert found.shape == (101, 64, 66 if shape[1] == 65 else 64, 3)  # padded to even sizes
    assert np.abs(found.mean(axis=(1, 2, 3)) - levels).max() < 1.5
    assert meta["fps"] == 10
    assert "yuv420p" in meta["pix_fmt"]  # what browsers play


def test_a_strip() -> None:
    """Equally spaced pictures, the last one among them; scaled to fit, apart from each other."""
    frames = [np.full((40, 80, 3), level, dtype=np.uint8) for level in range(0, 110, 10)]
    strip = film_strip(frames, count=3, size=20, gap=4)
    assert strip.shape == (10, 3 * 20 + 2 * 4, 3)
    assert (strip[:, :20] == 0).all()
    assert (strip[:, 24:44] == 50).all()
    assert (strip[:, 48:] == 100).all()
    assert (strip[:, 20:24] == 255).all()
    assert (strip[:, 44:48] == 255).all()
    assert film_strip(frames[:2], size=20).shape == (10, 2 * 20 + 8, 3)
    assert film_strip([np.zeros((80, 40, 3), np.uint8)], size=20).shape == (20, 10, 3)


class Frozen(vector_game.Auction):
    """An auction whose games can stay as they are when they end."""

    restarts = True

    def step(self, actions: list[np.ndarray]) -> Any:
        """Shows the last round after the game's end."""
        result = super().step(actions)
        self.round = self.round if self.restarts else np.where(result.over, self.rounds, self.round)
        return result


SPEEDS: dict[str, float] = {
    "sumo": 10.0,
    "builds": 10.0,
    "pursuit": 10.0,
    "mpe2.simple_push_v3": 10.0,
    "pettingzoo.classic.rps_v2": 2.0,  # agents act in turn
    "toy_games": 10.0,  # says nothing of its speed
    "test_video:Frozen": 4.0,
    "vector_game:Auction": 4.0,
}


@pytest.mark.parametrize("env_id", SPEEDS)
def test_the_deciding_picture_comes_last(
    env_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A picture before each step, and one of the end; a game that cannot show its end is named."""
    env = make_team_env(env_id, 1, render=True)
    written: list[tuple[list[np.ndarray], float]] = []
    monkeypatch.setattr(cross_play, "write_video", lambda path, frames, fps: written.append((frames, fps)))
    step, render, pictures, has_ended = env.step, env.render, [], False

    def spy_step(actions: list[np.ndarray]) -> Any:
        nonlocal has_ended
        result = step(actions)
        has_ended = bool(result.over[0])
        return result

    def spy_render() -> np.ndarray:
        pictures.append(has_ended)
        return render()

    monkeypatch.setattr(env, "step", spy_step)
    monkeypatch.setattr(env, "render", spy_render)
    first, second = (Player("random", team.behavior) for team in env.teams[:2])
    record_video(
        lambda *_, **__: env, {team.behavior: nn.Identity() for team in env.teams}, first, second, 0, True, tmp_path
    )
    ((frames, fps),) = written
    assert fps == SPEEDS[env_id]
    shows_end = env_id != "vector_game:Auction"
    assert pictures == [False] * (len(frames) - shows_end) + [True] * shows_end
    strip, width = iio.imread(tmp_path / "strip.png"), film_strip(frames[-1:]).shape[1]
    np.testing.assert_array_equal(strip[:, -width:], film_strip(frames[-1:]))
    path = tmp_path / "videos" / f"{first.behavior}-vs-random.mp4"
    note = "" if shows_end else " (without its end: Auction has no attribute restarts)"
    assert capsys.readouterr().out == f"video: {path}{note}\nframes of it: {tmp_path / 'strip.png'}\n"
    if env_id == "test_video:Frozen":
        assert [frame[0, 0, 0] for frame in frames] == [0, 10, 20, 30]


class Pictures(gym.Env):
    """Its pictures are the number of the step."""

    observation_space = action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}
    render_mode = "rgb_array"

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begins an episode."""
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Counts."""
        self.steps += 1
        return np.zeros(1, np.float32), 0.0, self.steps == 5, False, {}

    def render(self) -> Any:
        """Grey, of that brightness."""
        return np.full((4, 4, 3), self.steps, np.uint8)


@pytest.mark.parametrize(("limit", "shown"), [(100, [0, 1, 2, 3, 4, 5]), (3, [0, 1, 2])])
def test_a_recording_of_a_task(limit: int, shown: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pictures of the first episode, up to a limit: they are kept in memory until it ends."""
    written = []
    monkeypatch.setattr(utils.run, "write_video", lambda path, frames, fps: written.append((path, [*frames], fps)))
    monkeypatch.setattr(utils.run, "MAX_FRAMES", limit)
    env = utils.run.Recording(Pictures(), str(tmp_path), lambda episode: episode == 0, name_prefix="video")
    for _ in range(2):
        env.reset()
        while not env.step(0)[2]:
            pass
    env.close()
    ((path, frames, fps),) = written
    assert [int(frame[0, 0, 0]) for frame in frames] == shown
    assert (path, fps) == (tmp_path / "video-episode-0.mp4", 20)
