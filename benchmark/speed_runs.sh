#!/usr/bin/env bash
# The tables of speed in benchmark/results/, on a machine that does nothing else; takes `pip install stable-baselines3 sbx-rl`.
set -euo pipefail
cd "$(dirname "$0")/.."
python -m benchmark.speed --script ppo_continuous.py --against sb3 sbx --output benchmark/results/speed_ppo
python -m benchmark.speed --script sac_continuous.py --against sb3 sbx --output benchmark/results/speed_sac
python -m benchmark.speed --script ppo_selfplay.py sac_selfplay.py --output benchmark/results/speed_selfplay
