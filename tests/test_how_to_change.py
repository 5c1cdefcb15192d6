"""The changes under *How to change it* in docs/, made in a copy of the script and trained for some hundred steps."""

import re
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import Train, load_file, load_weights
from test_siblings import ROOT

Edit = tuple[str, str]  # of the script: text that is there once, and what takes its place
RESULTS = 'return {"eval/return_mean": returns.mean(), "eval/return_std": returns.std(), '
RESULTS += '"eval/length_mean": lengths.mean()}'


def code(page: str, section: str) -> list[str]:
    """The lines of all Python blocks of a section."""
    text = (ROOT / "docs" / f"{page}.md").read_text().split("## How to change it\n")[1].split(f"### {section}\n")[1]
    blocks = re.findall(r"```python\n(.*?)```", re.split(r"\n##+ ", text)[0], re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def block(lines: list[str]) -> str:
    """Lines as one text."""
    return "\n".join(lines)


def before(line: str, new: str) -> Edit:
    """Puts text in front of a line."""
    return line, f"{new}\n{line}"


def ppo_changes() -> dict[str, list[Edit]]:
    """The changes of docs/ppo.md."""
    wider, norm = code("ppo", "A wider network"), code("ppo", "Layer normalisation, or another activation")
    layer, actor = "layers += [layer] if is_output else [layer, nn.Tanh()]", "self.actor.mean.parameters()"
    critic = "self.critic = mlp(obs_dim, *HIDDEN_SIZES, 1, output_gain=1.0)"
    script = (ROOT / "ppo_continuous.py").read_text()
    acting = "is_known = all(" + script.split("is_known = all(")[1].split("        return act\n")[0]
    assert actor in acting
    mean_net = "self.mean = mlp(" + script.split("self.mean = mlp(")[1].split("    def forward")[0]
    std = code("ppo", "A standard deviation that depends on the observation")
    std_limit = (
        "    if args.std_min is not None:\n"
        + script.split("    if args.std_min is not None:\n")[1].split("    return")[0]
    )
    loss = script.split("    clipped_values = ")[1].split("    return loss")[0]
    optimizer, sgd = "optimizer = Adam(", code("sac", "Another optimiser")
    rate = "optimizer = Adam(agent.parameters(), args.learning_rate, 0.9, 0.999, 1e-5)"
    return {
        "wider": [("HIDDEN_SIZES = (64, 64)  # units of the hidden layers of actor and critic", wider[0])],
        "loss": [(f"clipped_values = {loss}", block(code("ppo", "Another loss")) + "\n")],
        "flag": [before("std_min: float | None = 0.2", block(code("ppo", "A new flag")))],
        "wrapper": [before("if not isinstance(env.observation_space", block(code("ppo", "An environment wrapper")))],
        "norm of the critic": [
            ("def mlp(*sizes: int, output_gain: float) -> nn.Sequential:", norm[0]),
            (layer, norm[1]),
            (critic, norm[2]),
        ],
        "metric": [(RESULTS, block(code("ppo", "A new evaluation metric")))],
        "standard deviation": [
            (mean_net.rstrip(), std[0]),
            ("return self.mean(obs), self.log_std", block(std[1:])),
            (acting, block(norm[4:]) + "\n"),
            (std_limit, ""),
        ],
        "norm of both": [(layer, norm[3]), (acting, block(norm[4:]) + "\n")],
        "SGD": [before("class Adam(", block(sgd[:14]) + "\n\n\n"), (rate, code("ppo", "Another optimiser")[0])],
        "RMSprop": [
            before("class Adam(", block(sgd[14:]) + "\n\n\n"),
            (rate, f"{optimizer.replace('Adam', 'TorchOptimizer')}agent.parameters(), args.learning_rate)"),
        ],
    }


def sac_changes() -> dict[str, list[Edit]]:
    """The changes of docs/sac.md."""
    wider, norm = code("sac", "A wider network"), code("sac", "Layer normalisation in the critics")
    sgd = code("sac", "Another optimiser")
    rate = "group, learning_rates[name]"
    adam = f"Adam({rate}, 0.9, 0.999, 1e-8)"
    classes = {"SGD": block(sgd[:14]), "RMSprop": block(sgd[14:])}
    classes["Adam of PyTorch"] = classes["RMSprop"].replace("RMSprop", "Adam")
    (reward,) = re.findall(r"`(buffer\.add\(.*)`", (ROOT / "docs" / "sac.md").read_text())
    norm_lines = [f'metrics["losses/{name}_grad_norm"] = gradient.norm()' for name in ("qf", "actor")]
    twos = ["torch.empty(2, fan_in, fan_out)", "torch.empty(2, 1, fan_out)", "len(x) == 2", ".expand(2, -1, -1)"]
    return {
        "wider": [("HIDDEN_SIZES = (256, 256)  # units of the hidden layers of actor and critics", wider[0])],
        "loss": [("qf_losses = (qf_values - td_target).square().mean(1)", code("sac", "Another loss")[0])],
        "flag": [before("autotune: bool = True", block(code("sac", "A new flag")))],
        "wrapper": [before("if not isinstance(env.observation_space", block(code("sac", "An environment wrapper")))],
        "reward": [("buffer.add(prev_obs, actions, rewards, final_obs, terminations)", reward)],
        "clip": [(norm_line, f"{norm_line}\n{block(code('sac', 'Clip the gradients'))}") for norm_line in norm_lines],
        "metric": [(RESULTS, block(code("sac", "A new evaluation metric")))],
        "more critics": [(old, old.replace("2", "3", 1)) for old in twos],
        "norm": [
            before("class TwinQNetwork(", block(norm[:-1]) + "\n\n\n"),
            ("layers += [TwinLinear(fan_in, fan_out), nn.ReLU()]", norm[-1]),
        ],
        **{
            name: [
                before("class Adam(", f"{text}\n\n\n"),
                (adam, f"SGD({rate}, 0.9)" if name == "SGD" else f"TorchOptimizer({rate})"),
            ]
            for name, text in classes.items()
        },
    }


CHANGES = {("ppo", name): edits for name, edits in ppo_changes().items()} | {
    ("sac", name): edits for name, edits in sac_changes().items()
}


@pytest.mark.parametrize(("page", "name"), CHANGES)
def test_change_of_the_page_trains(page: str, name: str, train: Train, tmp_path: Path) -> None:
    """Each edit's text is in the script once; the copy trains, and to other weights than the script.

    A new flag or metric alone changes none, and PyTorch's Adam only by rounding.
    """
    script, copied = f"{page}_continuous", f"{page}_{name.replace(' ', '_')}"
    text = (ROOT / f"{script}.py").read_text()
    for old, new in CHANGES[page, name]:
        before_old, *rest = text.split(old)
        assert len(rest) == 1, f"{old} stands {len(rest)} times in {script}.py"
        indent = " " * (len(before_old) - len(before_old.rstrip(" ")))
        text = before_old + textwrap.indent(new, indent).removeprefix(indent) + rest[0]
    (tmp_path / "utils").symlink_to(ROOT / "utils")
    (tmp_path / f"{copied}.py").write_text(text)
    module = load_file(tmp_path / f"{copied}.py", copied)
    module.__name__ = script  # `train` has the budget by name
    weights, expected = load_weights(train(module)), load_weights(train(sys.modules[script]))
    assert all(x.isfinite().all() for x in weights.values())
    if name == "Adam of PyTorch":  # where a gradient is nearly zero, Adam makes whole steps of its rounding
        far = [((weights[key] - value).abs() > 1e-3).float().mean() for key, value in expected.items()]
        assert max(far) < 0.01
    elif name in ("flag", "metric"):
        assert all(weights[key].equal(value) for key, value in expected.items())
    else:
        assert not all(weights[key].shape == x.shape and weights[key].equal(x) for key, x in expected.items())
