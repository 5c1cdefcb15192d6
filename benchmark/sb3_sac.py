"""Stable-Baselines3's SAC, as a run that `benchmark.sweep` starts and `benchmark.report` reads.

    pip install stable-baselines3
    python benchmark/sb3_sac.py --env-id Hopper-v5 --seed 201

The settings are the library's defaults, but with 10,000 random steps at the beginning instead of 100. Its authors use
these settings for MuJoCo tasks such as HalfCheetah, Hopper and Humanoid (RL Zoo 2.9.2, `hyperparams/sac.yml`).
Evaluations are those of `sac_continuous.py`: same seeds, same number of episodes. A run that was stopped begins anew,
in another folder.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # sac_continuous.py and utils/ stand there
import sac_continuous  # noqa: E402
from utils.run import Run, parse_args, prepare  # noqa: E402


@dataclass
class Args:
    """Stable-Baselines3's SAC: trains on any Gymnasium task with continuous actions."""

    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seed of all random numbers
    cuda: bool = True  # use the GPU if there is one
    eval_freq: int = 20_000  # environment steps between evaluations of the deterministic policy
    eval_episodes: int = 10  # episodes of an evaluation
    resume: Path | None = None  # begin the run of this folder anew, in another folder
    env_id: str = "HalfCheetah-v5"  # Gymnasium id; module:id imports the module first
    total_timesteps: int = 300_000  # environment steps of the run
    learning_starts: int = 10_000  # environment steps with random actions before the first update

    # what `Run` asks for, too
    evaluate: ClassVar[Path | None] = None
    track: ClassVar[bool] = False
    capture_video: ClassVar[bool] = False
    save_model: ClassVar[bool] = False
    checkpoint_freq: ClassVar[int] = 0


class Policy:
    """A model of Stable-Baselines3 as an agent that `sac_continuous.evaluate` takes."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def act(self, obs: np.ndarray) -> np.ndarray:
        """Observations (n, obs_dim) to deterministic actions (n, action_dim) in [-1, 1]."""
        actions, _ = self.model.predict(obs, deterministic=True)
        return self.model.policy.scale_action(actions)


def main(args: Args) -> Path:
    """Trains; returns the run folder."""
    from stable_baselines3 import SAC

    prepare(args, {"eval_episodes eval_freq learning_starts total_timesteps": (1, 1e12), "seed": (0, 2**31)})
    args = replace(args, resume=None)  # its buffer and its optimisers were not saved
    own = sac_continuous.Args(env_id=args.env_id, seed=args.seed, eval_episodes=args.eval_episodes)  # of the evaluation
    model = SAC(
        "MlpPolicy",
        sac_continuous.make_env(own),
        learning_starts=args.learning_starts,
        seed=args.seed,
        device="auto" if args.cuda else "cpu",
    )
    policy: Any = Policy(model)
    total_steps = -(-args.total_timesteps // args.eval_freq) * args.eval_freq  # rounded up to whole iterations
    envs: Any = model.get_env()
    with Run(args, envs, total_steps, args.eval_freq, model={"policy": model.policy}, rest={}) as run:
        for global_step, _ in run.steps():
            model.learn(args.eval_freq, reset_num_timesteps=False)
            global_step += args.eval_freq
            if global_step < total_steps:
                run.log(sac_continuous.evaluate(policy, own, run.folder, f"step-{global_step}"), global_step)
        run.log(sac_continuous.evaluate(policy, own, run.folder, "final"), total_steps)
    return run.folder


if __name__ == "__main__":
    main(parse_args(Args))
