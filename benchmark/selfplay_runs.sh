#!/usr/bin/env bash
# The self-play runs of the README, one thread each: bash benchmark/selfplay_runs.sh NAME [SEEDS], in a folder to which the runs/ go.
# NAME is one of the cases below; when the runs are there, `bash benchmark/selfplay_runs.sh tables` makes the README's numbers of them.
set -euo pipefail
export OMP_NUM_THREADS=1
scripts=$(cd "$(dirname "$0")/.." && pwd)
common="--eval-freq 250000 --eval-games 200"
if [[ $1 == tables ]]; then
    export PYTHONPATH=$scripts
    results=$scripts/benchmark/results/selfplay
    for name in ppo_sumo ppo_sumo_latest ppo_sumo_uniform ppo_sumo_discrete ppo_sumo_multidiscrete ppo_pursuit ppo_pursuit_latest \
        sac_sumo sac_sumo_discrete sac_sumo_multidiscrete sac_pursuit; do
        python -m benchmark.selfplay scores runs/*__"${name}"__* --csv "${results}_$name.csv"
    done
    versus() { # with likeliest actions, then with sampled ones
        sets=(--runs runs/*__"$1"__* --against runs/*__"$2"__*)
        python -m benchmark.selfplay versus "${sets[@]}" --csv "${results}_$3.csv"
        python -m benchmark.selfplay versus "${sets[@]}" --csv "${results}_$3_sampled.csv" --no-deterministic
    }
    versus ppo_sumo ppo_sumo_latest pool_against_latest
    versus ppo_sumo ppo_sumo_uniform prioritized_against_uniform
    versus ppo_sumo_uniform ppo_sumo_latest uniform_against_latest
    versus ppo_pursuit ppo_pursuit_latest pursuit_pool_against_latest
    for end in csv png; do
        cp runs/sumo__ppo_sumo__1__*/cross_play.$end "${results}_cross_play.$end"
    done
    exit
fi
for seed in ${2:-1 2 3 4 5}; do
    case $1 in
        ppo_sumo) python "$scripts/ppo_selfplay.py" --exp-name "$1" --seed "$seed" $common ;;
        ppo_sumo_latest) python "$scripts/ppo_selfplay.py" --exp-name "$1" --seed "$seed" $common --play-against-latest-model-ratio 1 ;;
        ppo_sumo_uniform) python "$scripts/ppo_selfplay.py" --exp-name "$1" --seed "$seed" $common --opponent-sampling uniform ;;
        ppo_sumo_discrete) python "$scripts/ppo_selfplay.py" --exp-name "$1" --seed "$seed" $common --env-kwargs '{"actions": "discrete"}' ;;
        ppo_sumo_multidiscrete) python "$scripts/ppo_selfplay.py" --exp-name "$1" --seed "$seed" $common --env-kwargs '{"actions": "multidiscrete"}' ;;
        ppo_pursuit) python "$scripts/ppo_selfplay.py" --exp-name "$1" --seed "$seed" $common --total-timesteps 5000000 --opponent-sampling uniform --env-id pursuit ;;
        ppo_pursuit_latest) python "$scripts/ppo_selfplay.py" --exp-name "$1" --seed "$seed" $common --total-timesteps 5000000 --play-against-latest-model-ratio 1 --env-id pursuit ;;
        sac_sumo) python "$scripts/sac_selfplay.py" --exp-name "$1" --seed "$seed" $common ;;
        sac_sumo_discrete) python "$scripts/sac_selfplay.py" --exp-name "$1" --seed "$seed" $common --env-kwargs '{"actions": "discrete"}' ;;
        sac_sumo_multidiscrete) python "$scripts/sac_selfplay.py" --exp-name "$1" --seed "$seed" $common --env-kwargs '{"actions": "multidiscrete"}' ;;
        sac_pursuit) python "$scripts/sac_selfplay.py" --exp-name "$1" --seed "$seed" $common --total-timesteps 2000000 --env-id pursuit ;;
        *) echo "unknown: $1" && exit 2 ;;
    esac
done
