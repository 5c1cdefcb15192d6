#!/usr/bin/env bash
# The sweeps behind the README's tables and curves, on two cores: bash benchmark/sweep_runs.sh NAME, in an empty folder.
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$repository OMP_NUM_THREADS=1
sweep() { python -m benchmark.sweep "$@"; }
report() { python -m benchmark.report "${@:2}" --output "$repository/benchmark/results/$1"; }
case $1 in
    mujoco) # about two hours
        tasks="HalfCheetah-v5 Hopper-v5 Walker2d-v5"
        sweep --script "$repository/ppo_continuous.py" --env-ids $tasks --num-seeds 5 --workers 2 --folder sweeps/ppo_1m \
            -- --total-timesteps 1000000 --no-cuda
        sweep --script "$repository/sac_continuous.py" --env-ids $tasks --num-seeds 3 --workers 2 --folder sweeps/sac_100k \
            -- --total-timesteps 100000 --eval-freq 20000 --no-cuda
        report mujoco sweeps/ppo_1m/runs/* sweeps/sac_100k/runs/*
        ;;
    small) # twenty minutes; everything is killed in the middle of it, and the same command goes on
        flags="--total-timesteps 15000 --eval-freq 2500 --checkpoint-freq 5000 --no-cuda"
        small() {
            sweep --script "$repository"/{ppo,sac}_continuous.py --env-ids Pendulum-v1 InvertedPendulum-v5 Hopper-v5 \
                --num-seeds 5 --workers 2 --folder sweeps/small -- $flags
        }
        small &
        sleep 10m
        pkill -KILL -f -- "--total-timesteps 15000" || true
        wait || true
        small
        PYTHONPATH=$repository:$repository/tests sweep --script "$repository/ppo_continuous.py" --env-ids toy_envs:Broken-v0 \
            --num-seeds 1 --folder sweeps/small -- $flags || true # reported as failed
        report small sweeps/small/runs/* --normalize-by sac_continuous
        ;;
    *) echo "unknown: $1" && exit 2 ;;
esac
