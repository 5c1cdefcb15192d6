#!/usr/bin/env bash
# The measurements of benchmark/results/speed/, and the cost of checkpoints: half an hour on a machine that does nothing else. It
# prints the tables. Takes `pip install stable-baselines3 sbx-rl`.
set -euo pipefail
cd "$(dirname "$0")/.."
speed() { python -m benchmark.speed "${@:2}" --rounds 3 --output "benchmark/results/speed/$1.csv"; }
speed ppo --script ppo_continuous.py --against sb3 sbx
speed ppo_16 --script ppo_continuous.py --num-envs 16 --num-steps 128 --steps 32768
speed ppo_8 --script ppo_continuous.py --num-envs 8 --steps 32768 --against sb3
speed ppo_8_short --script ppo_continuous.py --num-envs 8 --num-steps 256 --steps 32768 --against sb3
speed sac --script sac_continuous.py --against sb3 sbx
speed sac_full --script sac_continuous.py --full-buffer --against sb3 sbx
speed selfplay --script ppo_selfplay.py sac_selfplay.py
OMP_NUM_THREADS=1 python -m benchmark.checkpoints sac_continuous --env-id HalfCheetah-v5 --updates-per-step 0 --eval-freq 0 --no-cuda
