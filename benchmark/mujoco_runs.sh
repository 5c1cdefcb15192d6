#!/usr/bin/env bash
# PPO and SAC on three MuJoCo tasks, and the report on them: several hours of two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
tasks="HalfCheetah-v5 Hopper-v5 Walker2d-v5"
python -m benchmark.sweep --script ppo_continuous.py --env-ids $tasks --num-seeds 5 --workers 2 -- --total-timesteps 1000000 --no-cuda
python -m benchmark.sweep --script sac_continuous.py --env-ids $tasks --num-seeds 3 --workers 2 -- --total-timesteps 100000 --eval-freq 20000 --no-cuda
python -m benchmark.report sweeps/ppo_continuous/runs/* sweeps/sac_continuous/runs/* --output benchmark/results/mujoco
