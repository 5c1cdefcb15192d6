#!/usr/bin/env bash
# The runs behind the README's table and curves: about ten minutes (PPO) and twenty minutes each (SAC) on one thread.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
python ppo_continuous.py --env-id HalfCheetah-v5
python sac_continuous.py --env-id HalfCheetah-v5 --total-timesteps 100000 --eval-freq 50000
python sac_continuous.py --env-id HalfCheetah-v5 --total-timesteps 100000 --value-network --exp-name sac_value
python -m benchmark.report runs/HalfCheetah-v5__* --output benchmark/results/halfcheetah
