#!/usr/bin/env bash
# The studies in benchmark/results/ whose runs are of the single-agent scripts, on two cores: bash benchmark/sweep_runs.sh NAME, in an
# empty folder. `workers=1 bash ...` runs one at a time. `report` writes the study's folder; the text of its page outside of the marker lines stays.
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$repository OMP_NUM_THREADS=1
sweep() { python -m benchmark.sweep "$@"; }
report() { python -m benchmark.report "${@:2}" --output "$repository/benchmark/results/$1"; } # STUDY RUNS FLAGS
reference="--num-envs 1 --num-steps 2048 --target-kl None --std-min None --norm-adv --gae-lambda 0.95"
ppo() { # EXPERIMENT TASKS FLAGS; the recipe was chosen on seeds 11 to 502
    sweep --script "${script:-$repository/ppo_continuous.py}" --exp-name "$1" --folder "sweeps/$1" --env-ids $2 --first-seed 601 \
        --num-seeds "${num_seeds:-10}" --workers "${workers:-2}" -- --eval-freq 50000 --no-cuda "${@:3}"
}
pool="HalfCheetah-v5 Hopper-v5 Walker2d-v5 Ant-v5 InvertedDoublePendulum-v5"
case $1 in
    ppo) # the default recipe beside the reference's, and an earlier default with ten changes, which has not been run on the last two tasks
        ppo ppo_continuous "$pool Humanoid-v5 Pendulum-v1"
        ppo ppo_reference "$pool Humanoid-v5 Pendulum-v1" $reference
        [ -d ten_changes ] || git clone --quiet "$repository" ten_changes
        git -C ten_changes checkout --quiet fd2328b
        script=ten_changes/ppo_continuous.py ppo ppo_ten_changes "$pool Humanoid-v5 Pendulum-v1"
        report ppo sweeps/ppo_{continuous,reference,ten_changes} --normalize-by ppo_continuous \
            --labels ppo_continuous="PPO, defaults" ppo_reference="PPO, reference's settings" ppo_ten_changes="PPO, ten changes"
        ;;
    ppo_ablation) # each change undone alone, and two and three together, after `ppo`; of the last two four seeds have been run
        ppo ppo_one_environment "$pool" --num-envs 1 --num-steps 2048
        ppo ppo_std_1 "$pool" --std-min None
        ppo ppo_all_epochs "$pool" --target-kl None
        ppo ppo_norm_adv "$pool" --norm-adv
        ppo ppo_lambda "$pool" --gae-lambda 0.95
        ppo ppo_adv_kl "$pool" --norm-adv --target-kl None
        ppo ppo_noise_only "$pool" --gae-lambda 0.95 --norm-adv --target-kl None
        (
            mkdir -p humanoid && cd humanoid # apart, since these are not in the page's tables; `more.csv` has them
            num_seeds=2
            ppo ppo_all_epochs Humanoid-v5 --target-kl None
            ppo ppo_norm_adv Humanoid-v5 --norm-adv
            ppo ppo_lambda Humanoid-v5 --gae-lambda 0.95
            ppo ppo_adv_kl Humanoid-v5 --norm-adv --target-kl None
        )
        report ppo_ablation sweeps/ppo_{continuous,reference,one_environment,std_1,all_epochs,norm_adv,lambda,adv_kl,noise_only} \
            --normalize-by ppo_continuous --labels ppo_continuous=defaults ppo_one_environment="one environment" \
            ppo_std_1="standard deviation from 1" ppo_all_epochs="no KL limit" ppo_norm_adv="normalised advantages" \
            ppo_lambda="lambda 0.95" ppo_adv_kl="no KL limit and normalised advantages" \
            ppo_noise_only="less noise and 16 environments alone" ppo_reference="reference's settings"
        ;;
    ppo_others) # both recipes on tasks that took no part in any choice
        others="HumanoidStandup-v5 MountainCarContinuous-v0 Pusher-v5 Reacher-v5 Swimmer-v5"
        num_seeds=5 ppo ppo_continuous_others "$others"
        num_seeds=5 ppo ppo_reference_others "$others" $reference
        report ppo_others sweeps/ppo_{continuous,reference}_others --normalize-by ppo_continuous_others
        num_seeds=5 ppo ppo_std_1_others "MountainCarContinuous-v0 Swimmer-v5" --std-min None # one change undone, on two tasks
        num_seeds=5 ppo ppo_lambda_others "MountainCarContinuous-v0 Swimmer-v5" --gae-lambda 0.95
        num_seeds=5 ppo ppo_one_environment_others Swimmer-v5 --num-envs 1 --num-steps 2048
        num_seeds=5 ppo ppo_norm_adv_others Swimmer-v5 --norm-adv
        num_seeds=5 ppo ppo_all_epochs_others Swimmer-v5 --target-kl None
        # one_change.csv of the study is scores.csv of this report
        python -m benchmark.report sweeps/ppo_{std_1,lambda,one_environment,norm_adv,all_epochs}_others --output one_change
        ;;
    sac) # beside the published curves and Stable-Baselines3; two to three hours of one thread for a million steps
        sac_long() { # SCRIPT TASKS STEPS SEEDS
            sweep --script "$repository/$1.py" --env-ids $2 --seeds $4 --workers "${workers:-2}" --folder "sweeps/$(basename "$1")_$3" \
                -- --total-timesteps "$3" --eval-freq 20000 --no-cuda
        }
        sac_long sac_continuous "HalfCheetah-v5 Hopper-v5 Walker2d-v5" 1000000 "201 202 203"
        sac_long sac_continuous "Ant-v5 Humanoid-v5" 300000 "201 202 203"
        # two more seeds of the task whose three miss the published mean at a million steps
        sweep --script "$repository/sac_continuous.py" --exp-name sac_more_seeds --folder sweeps/sac_more_seeds --env-ids Walker2d-v5 \
            --seeds 204 205 --workers "${workers:-2}" -- --total-timesteps 1000000 --eval-freq 20000 --no-cuda
        sac_changed() { # EXPERIMENT TASK SEEDS FLAGS
            sweep --script "$repository/sac_continuous.py" --exp-name "$1" --folder "sweeps/$1_$2" --env-ids "$2" --seeds $3 \
                --workers "${workers:-2}" -- --total-timesteps 300000 --eval-freq 20000 --no-cuda "${@:4}"
        }
        # Ant with the observations of Ant-v4, which the published runs had
        sac_changed sac_no_contact Ant-v5 "201 202 203" --env-kwargs '{"include_cfrc_ext_in_observation": false}'
        # other seeds, with the default learning rates, 1e-3, and with those of Haarnoja et al.
        sac_changed sac_default_lr Humanoid-v5 "211 212"
        sac_changed sac_default_lr HalfCheetah-v5 "211 212 213"
        low="--policy-lr 3e-4 --q-lr 3e-4 --alpha-lr 3e-4"
        sac_changed sac_low_lr Humanoid-v5 "211 212 213 214" $low
        sac_changed sac_low_lr HalfCheetah-v5 "211 212 213" $low
        sac_long benchmark/sb3_sac "HalfCheetah-v5 Hopper-v5 Walker2d-v5 Ant-v5 Humanoid-v5" 300000 201
        # with the library's own number of random steps
        sweep --script "$repository/benchmark/sb3_sac.py" --exp-name sb3_sac_100 --folder sweeps/sb3_sac_100 --env-ids HalfCheetah-v5 --seeds 201 \
            --workers 1 -- --total-timesteps 300000 --eval-freq 20000 --learning-starts 100 --no-cuda
        report sac sweeps/{sac_{continuous_1000000,continuous_300000,more_seeds,no_contact_*,default_lr_*,low_lr_*},sb3_sac_300000,sb3_sac_100} \
            --published "$repository/benchmark/published_curves.csv" --published-algorithms sac \
            --labels sac_continuous=SAC sac_more_seeds="SAC, two more seeds" sac_no_contact="SAC, without contact forces" \
            sac_default_lr="SAC, other seeds" sac_low_lr="SAC, learning rates 3e-4" sb3_sac="Stable-Baselines3's SAC" \
            sb3_sac_100="Stable-Baselines3's SAC, 100 random steps"
        ;;
    sac_recipe) # SAC's defaults and one change to them at a time, twenty-five minutes
        sac() { # EXPERIMENT SCRIPT FLAGS
            sweep --script "$2" --exp-name "$1" --folder "sweeps/$1" --env-ids HalfCheetah-v5 Hopper-v5 --num-seeds 3 --workers "${workers:-2}" \
                -- --total-timesteps 20000 --eval-freq 5000 --no-cuda "${@:3}"
        }
        sac sac_continuous "$repository/sac_continuous.py"
        sac sac_policy_lr_3e-4 "$repository/sac_continuous.py" --policy-lr 3e-4
        sac sac_half_target_entropy "$repository/sac_continuous.py" --target-entropy-scale 0.5
        # the log standard deviation within [-5, 2] by a tanh, as in CleanRL, which begins at -1.5; not clamped to [-20, 2]
        sed 's/log_std.clamp(-20.0, 2.0)/-5.0 + 3.5 * (log_std.tanh() + 1.0)/' "$repository/sac_continuous.py" >sac_tanh_log_std.py
        ! cmp --silent "$repository/sac_continuous.py" sac_tanh_log_std.py || { echo "sac_tanh_log_std.py changes nothing" && exit 1; }
        sac sac_tanh_log_std sac_tanh_log_std.py
        report sac_recipe sweeps/sac_{continuous,policy_lr_3e-4,half_target_entropy,tanh_log_std}
        ;;
    sac_recurrent) # a pendulum whose angle is hidden, with and without memory; half an hour of one core
        flags="--learning-starts 1000 --total-timesteps 12000 --eval-freq 2000 --checkpoint-freq 3000 --no-cuda"
        sweep --script "$repository/variants/sac_recurrent.py" --env-ids Pendulum-v1 --first-seed 101 --num-seeds 5 --workers "${workers:-2}" \
            --folder sweeps/sac_recurrent -- --observe 2 --sequence-length 32 $flags
        sweep --script "$repository/sac_continuous.py" --env-ids benchmark.hidden:PendulumVelocity-v1 --first-seed 101 --num-seeds 5 \
            --workers "${workers:-2}" --folder sweeps/sac_hidden -- $flags
        report sac_recurrent sweeps/sac_{recurrent,hidden}
        ;;
    sac_recall) # a cue that is longer ago than a sequence: stored state and burn-in against zeros; a quarter of an hour
        recall() { # EXPERIMENT FLAGS
            sweep --script "$repository/variants/sac_recurrent.py" --exp-name "$1" --folder "sweeps/$1" --env-ids benchmark.recall:Recall-v0 \
                --first-seed 101 --num-seeds 5 --workers "${workers:-2}" -- --num-envs 8 --updates-per-step 0.25 --batch-size 32 --hidden-size 32 \
                --gamma 0.9 --alpha 0.1 --learning-starts 1000 --eval-freq 2000 --eval-episodes 50 --log-freq 2000 \
                --total-timesteps 8000 --no-cuda "${@:2}"
        }
        recall recall_zeros --sequence-length 8 --no-stored-state
        recall recall_stored --sequence-length 8
        recall recall_zeros_burn_in --sequence-length 12 --burn-in 4 --no-stored-state
        recall recall_stored_burn_in --sequence-length 12 --burn-in 4
        recall recall_long --sequence-length 32 --no-stored-state
        report sac_recall sweeps/recall_{zeros,stored,zeros_burn_in,stored_burn_in,long} --labels recall_zeros=zeros \
            recall_stored="stored state" recall_zeros_burn_in="zeros, burn-in" recall_stored_burn_in="stored state, burn-in" \
            recall_long="zeros, as long as an episode"
        ;;
    sac_positions) # a double pendulum whose velocities are hidden, with and without memory, and as it is; seventy minutes of one core
        flags="--learning-starts 1000 --total-timesteps 30000 --eval-freq 3000 --checkpoint-freq 3000 --no-cuda"
        positions() { # EXPERIMENT SCRIPT TASK FLAGS
            sweep --script "$repository/$2.py" --exp-name "$1" --folder "sweeps/positions_$1" --env-ids "$3" --seeds 101 102 103 \
                --workers "${workers:-2}" -- $flags "${@:4}"
        }
        positions memory variants/sac_recurrent InvertedDoublePendulum-v5 --observe 0,1,2,3,4 --sequence-length 32 --updates-per-step 0.5
        positions no_memory sac_continuous benchmark.hidden:DoublePendulumPositions-v1
        positions all sac_continuous InvertedDoublePendulum-v5
        report sac_positions sweeps/positions_{memory,no_memory,all} --labels memory="hidden velocities, memory" \
            no_memory="hidden velocities, no memory" all="whole observations, no memory"
        ;;
    sac_rewards) # a reward that the task's own does not lead to: with random network distillation, with curiosity, without
        flags="--learning-starts 1000 --total-timesteps 10000 --eval-freq 1000 --checkpoint-freq 0 --no-cuda"
        rewards() { # EXPERIMENT SCRIPT FIRST_SEED NUM_SEEDS FLAGS
            sweep --script "$repository/$2.py" --exp-name "$1" --folder "sweeps/rewards_$1" --env-ids MountainCarContinuous-v0 \
                --first-seed "$3" --num-seeds "$4" --workers "${workers:-2}" -- $flags "${@:5}"
        }
        rewards rnd variants/sac_rewards 311 5 --streams extrinsic,rnd
        rewards curiosity variants/sac_rewards 311 10 --streams extrinsic,curiosity
        rewards without sac_continuous 106 5
        report sac_rewards sweeps/rewards_{rnd,curiosity,without} --labels rnd="random network distillation" \
            without="sac_continuous.py"
        ;;
    sac_gail) # imitation of PPO's policy without rewards, and on a task whose episodes can end; two hours of one core
        expert() { # TASK STEPS; sets `demonstrations`
            trained=("$PWD/runs/$1__ppo_continuous__901__"*/model.pt)
            if [ ! -e "${trained[-1]}" ]; then
                python "$repository/ppo_continuous.py" --env-id "$1" --seed 901 --total-timesteps "$2" --eval-freq 0 --no-cuda
                trained=("$PWD/runs/$1__ppo_continuous__901__"*/model.pt)
            fi
            run=$(dirname "${trained[-1]}")
            python "$repository/variants/sac_rewards.py" --record-demonstrations "$run" --eval-episodes 10
            demonstrations=$run/demonstrations.npz
        }
        gail() { # TASK FLAGS
            sweep --script "$repository/variants/sac_rewards.py" --exp-name gail --folder "sweeps/gail_$1" --env-ids "$1" --seeds 101 102 103 \
                --workers "${workers:-2}" -- --streams gail --demonstrations "$demonstrations" --no-cuda "${@:2}"
        }
        expert HalfCheetah-v5 1000000
        gail HalfCheetah-v5 --total-timesteps 100000 --eval-freq 5000
        expert InvertedPendulum-v5 200000
        gail InvertedPendulum-v5 --total-timesteps 5000 --learning-starts 1000 --eval-freq 1000
        report sac_gail sweeps/gail_* --labels gail=GAIL
        ;;
    sac_pixels) # Pendulum from pictures, with random shifts and without; two hours of one core
        flags="--grey --total-timesteps 15000 --eval-freq 3000 --checkpoint-freq 3000 --no-cuda"
        pixels() { # EXPERIMENT FLAGS
            sweep --script "$repository/variants/sac_pixels.py" --exp-name "$1" --folder "sweeps/pixels_$1" --env-ids Pendulum-v1 \
                --first-seed 101 --num-seeds 5 --workers "${workers:-2}" -- $flags "${@:2}"
        }
        pixels shifts
        pixels no_shifts --max-shift 0
        report sac_pixels sweeps/pixels_{shifts,no_shifts} --labels shifts="random shifts" no_shifts="no shifts"
        ;;
    sac_cartpole) # dm_control's cartpole from pictures: pip install dm_control shimmy; two hours of one core
        sweep --script "$repository/variants/sac_pixels.py" --env-ids shimmy:dm_control/cartpole-swingup-v0 --seeds 101 \
            --workers "${workers:-2}" --folder sweeps/sac_cartpole -- --env-kwargs '{"render_kwargs": {"height": 64, "width": 64, "camera_id": 0}}' \
            --grey --action-repeat 8 --total-timesteps 130000 --eval-freq 2500 --checkpoint-freq 2500 --no-cuda
        report sac_cartpole sweeps/sac_cartpole
        ;;
    sac_crossq) # SAC without target networks beside SAC and the published curves; sixteen hours of one core
        crossq() { # script, seeds
            sweep --script "$repository/$1.py" --folder "sweeps/$(basename "$1")_100k" --seeds "${@:2}" --workers "${workers:-2}" \
                --env-ids HalfCheetah-v5 Hopper-v5 Walker2d-v5 Ant-v5 -- --total-timesteps 100000 --eval-freq 5000 --no-cuda
        }
        crossq variants/sac_crossq 114 115 116
        crossq sac_continuous 101 102 103
        report sac_crossq sweeps/sac_{crossq,continuous}_100k \
            --published "$repository/benchmark/published_curves.csv" --published-algorithms crossq sac
        ;;
    *) echo "unknown: $1" && exit 2 ;;
esac
