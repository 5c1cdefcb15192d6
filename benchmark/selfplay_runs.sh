#!/usr/bin/env bash
# The studies in benchmark/results/ of the self-play scripts, one thread a run: bash benchmark/selfplay_runs.sh sumo (or pursuit,
# builds, builds_box), in an empty folder. The same command again goes on where it was cut off, and makes the tables at the end.
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$repository OMP_NUM_THREADS=1
run() { # EXPERIMENT SCRIPT TASK SEEDS FLAGS
    python -m benchmark.sweep --script "$repository/$2" --exp-name "$1" --folder "sweeps/$1" --env-ids "$3" --seeds $4 --workers 2 \
        -- --eval-freq 250000 --eval-games 200 --no-cuda "${@:5}"
}
tables() { # STUDY, PATTERN OF ALL EXPERIMENTS, THOSE THAT PLAY EACH OTHER
    results=$repository/benchmark/results/$1
    python -m benchmark.selfplay scores sweeps/$2/runs/* --csv "$results/scores.csv"
    python -m benchmark.selfplay versus "${@:3}" --csv "$results/versus.csv"
}
responses() { # STUDY, RUNS AND FLAGS; the study's own file may have older runs
    python -m benchmark.selfplay exploitability "${@:2}" --csv exploitability.csv
    cp exploitability.csv "$repository/benchmark/results/$1/exploitability.csv"
}
case $1 in
    sumo)
        run ppo_sumo ppo_selfplay.py sumo "1 2 3 4 5"
        run ppo_sumo_latest ppo_selfplay.py sumo "1 2 3 4 5" --play-against-latest-model-ratio 1
        run ppo_sumo_uniform ppo_selfplay.py sumo "1 2 3 4 5" --opponent-sampling uniform
        run ppo_sumo_discrete ppo_selfplay.py sumo 1 --env-kwargs '{"actions": "discrete"}'
        run ppo_sumo_multidiscrete ppo_selfplay.py sumo 1 --env-kwargs '{"actions": "multidiscrete"}'
        run sac_sumo sac_selfplay.py sumo "11 12 13 14 15" # its settings were chosen on 1 to 3
        run sac_sumo_discrete sac_selfplay.py sumo 1 --env-kwargs '{"actions": "discrete"}'
        run sac_sumo_multidiscrete sac_selfplay.py sumo 1 --env-kwargs '{"actions": "multidiscrete"}'
        tables selfplay_sumo "*_sumo*" sweeps/ppo_sumo{,_latest,_uniform}/runs/*
        responses selfplay_sumo sweeps/{ppo_sumo{,_latest},sac_sumo,*discrete}/runs/* --policies last --steps 2000000
        for end in csv png; do
            cp sweeps/ppo_sumo/runs/sumo__ppo_sumo__1__*/cross_play.$end "$repository/benchmark/results/selfplay_sumo/cross_play.$end"
        done
        ;;
    pursuit)
        run ppo_pursuit ppo_selfplay.py pursuit "1 2 3 4 5" --total-timesteps 5000000
        run ppo_pursuit_latest ppo_selfplay.py pursuit "1 2 3 4 5" --total-timesteps 5000000 --play-against-latest-model-ratio 1
        run sac_pursuit sac_selfplay.py pursuit "11 12 13 14 15" --total-timesteps 2000000
        tables selfplay_pursuit "*_pursuit*" sweeps/ppo_pursuit{,_latest}/runs/*
        responses selfplay_pursuit sweeps/*_pursuit*/runs/* --policies last --steps 2000000
        ;;
    builds)
        for entropy in 0 0.01; do
            builds() { # NAME FLAGS
                run "ppo_builds_$1_$entropy" ppo_selfplay.py builds "1 2 3 4 5" --total-timesteps 1500000 --save-steps 100000 \
                    --env-kwargs '{"actions": "discrete"}' --ent-coef $entropy "${@:2}"
            }
            builds prioritized
            builds latest --play-against-latest-model-ratio 1
            builds current --current-share 1
            builds uniform --opponent-sampling uniform
            builds newest --opponent-sampling uniform --newest-share 0.5
        done
        responses selfplay_builds sweeps/ppo_builds_*/runs/*
        ;;
    builds_box)
        box() { # NAME FLAGS
            run "ppo_box_$1" ppo_selfplay.py builds "1 2 3" --total-timesteps 3000000 "${@:2}"
        }
        box prioritized
        box latest --play-against-latest-model-ratio 1
        box uniform --opponent-sampling uniform
        box newest --opponent-sampling uniform --newest-share 0.5
        python -m benchmark.selfplay exploitability sweeps/ppo_box_*/runs/* --csv box.csv
        cp box.csv "$repository/benchmark/results/selfplay_builds/box.csv"
        ;;
    *) echo "unknown: $1" && exit 2 ;;
esac
