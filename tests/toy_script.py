"""Counts to --total-timesteps, with the flags, files, signals and exit statuses of the training scripts; ten steps a
second.
"""

import argparse
import fcntl
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
for flag in ("env-id", "exp-name", "resume", "note"):
    parser.add_argument(f"--{flag}", default="")
parser.add_argument("--seed", type=int)
parser.add_argument("--total-timesteps", type=int)
parser.add_argument("--breaks", default="", help="fails for seed 2 as long as this file exists")
parser.add_argument("--no-cuda", action="store_true")
parser.add_argument("--device", default="cpu", help="that it says it runs on")
parser.add_argument("--stubborn", type=int, help="seed that does not heed signals")
args = parser.parse_args()
stops: list[int] = []
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, lambda signum, _: None if args.stubborn == args.seed else stops.append(signum))

if args.env_id == "Refused-v0":
    print("error: --env-id takes another task", file=sys.stderr)
    sys.exit(2)
step, run = 0, Path(args.resume)
if args.resume:
    budget = args.total_timesteps
    vars(args).update(json.loads((run / "args.json").read_text()))
    args.total_timesteps = budget or args.total_timesteps
    try:
        step = int((run / "checkpoint.pt").read_text())
        if step == args.total_timesteps:
            print("error: --resume takes a run that has not finished, or more --total-timesteps", file=sys.stderr)
            sys.exit(2)
    except ValueError:
        print("error: --resume takes a run folder with a valid checkpoint", file=sys.stderr)
        sys.exit(2)
else:
    args.total_timesteps = args.total_timesteps or 2
    run = Path("runs") / re.sub(r"[^\w.-]", "-", f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}")
    while run.exists():
        run = run.with_name(run.name + "-2")
    run.mkdir(parents=True)
(run / "args.json").write_text(json.dumps({name: value for name, value in vars(args).items() if name != "resume"}))
print(
    f"toy: {args.env_id}, seed {args.seed}, {args.total_timesteps:,} steps on {args.device}, run folder {run}",
    flush=True,
)

lock = os.open(run.name.rpartition("__")[0] + ".lock", os.O_RDWR | os.O_CREAT)
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    Path("TWICE").touch()
start = time.time()
while step < args.total_timesteps and not stops:
    time.sleep(0.1)
    step += 1
    with (run / "steps").open("a") as file:
        print(step, file=file)
    print(f"step {step:,} of {args.total_timesteps:,}, 1,000 steps/s, return {step / 2:.1f}", flush=True)
    if step % 2 == 0:
        (run / "checkpoint.pt").write_text(str(step))
    if args.breaks and Path(args.breaks).exists() and args.seed == 2:
        print("ValueError: the task broke", file=sys.stderr)
        sys.exit(1)
(run / "checkpoint.pt").write_text(str(step))
if stops:
    sys.exit(128 + stops[0])
facts = {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES"), "threads": os.environ.get("OMP_NUM_THREADS")}
(run / "facts.json").write_text(json.dumps(facts | {"start": start, "end": time.time()}))
print("evaluation: return 7.25 +/- 0.50, length 3.0, over 2 episodes")
