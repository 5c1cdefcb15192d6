#!/usr/bin/env bash
# The tables of speed in benchmark/results/, on a machine that does nothing else: about half an hour.
set -euo pipefail
cd "$(dirname "$0")/.."
pip install stable-baselines3 sbx-rl
python -m benchmark.speed --script ppo_continuous.py sac_continuous.py --against sb3 sbx --output benchmark/results/speed
python -m benchmark.speed --script ppo_continuous.py --num-envs 8 --steps 65536 --against sb3 sbx --output benchmark/results/speed_8
python -m benchmark.speed --script ppo_selfplay.py sac_selfplay.py --output benchmark/results/speed_selfplay
