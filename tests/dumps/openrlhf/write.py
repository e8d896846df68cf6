"""Write the dumps in this folder with OpenRLHF's own code: advantages, counts of a step, loss, and a hook that saves.

    pip install --no-deps --target openrlhf openrlhf==0.11.2; pip install torch==2.13.0 einops transformers
    python tests/dumps/openrlhf/write.py openrlhf tests/dumps/openrlhf

OpenRLHF has no writer of a training step: what `step` saves is what a user saves in
`ActorPPOTrainer.training_step`. Losses, `Experience` and the counts of a step are imported, without the ``__init__`` of
the packages above, which import engines; `training_step` and `compute_advantages_and_returns` are executed from their
source files (own_source.py) on objects that have their attributes. Eight sequences of two prompts in four micro-batches
of two ranks; the ranks' counts are added up in this process, in place of the collective, and DeepSpeed's division by
micro-batches and mean over ranks are done in `backward` and in the hook.
"""

import importlib
import itertools
import shutil
import sys
import types
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from own_source import function

RANKS, MICRO, SAMPLES = 2, 2, 4
LENGTHS = (6, 3, 5, 4, 2, 7, 1, 3)
REWARDS = (1.0, 0.0, 0.5, 0.0, 1.0, 0.25, 1.0, 0.75)


def imported(source: Path) -> SimpleNamespace:
    """Import modules without the ``__init__`` of their packages."""
    packages = ("openrlhf", "openrlhf.models", "openrlhf.utils", "openrlhf.trainer", "openrlhf.trainer.ppo_utils")
    for name in packages:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(source / name.replace(".", "/"))]
    sys.modules["deepspeed"] = types.ModuleType("deepspeed")  # imported, and not called
    padding = SimpleNamespace(zero_pad_sequences=None)  # of a module that imports engines; not called
    sys.modules["openrlhf.utils.utils"] = padding
    return SimpleNamespace(
        loss=importlib.import_module("openrlhf.models.loss"),
        utils=importlib.import_module("openrlhf.models.utils"),
        counts=importlib.import_module("openrlhf.utils.loss_utils"),
        experience=importlib.import_module("openrlhf.trainer.ppo_utils.experience"),
        lengths=importlib.import_module("openrlhf.trainer.ppo_utils.length_penalty"),
    )


def arguments(**options) -> SimpleNamespace:
    """Options of the command line, with the defaults of 0.11.2 where they are not given."""
    advantage = SimpleNamespace(estimator="group_norm", gamma=1.0, lambd=1.0, no_std_norm=False)
    kl = SimpleNamespace(use_loss=True, init_coef=0.05, estimator="k3", unbiased_gradient=False)
    reward = SimpleNamespace(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None)
    return SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage, kl=kl),
        actor=SimpleNamespace(entropy_coef=None, aux_loss_coef=0.0),
        rollout=SimpleNamespace(n_samples_per_prompt=SAMPLES),
        train=SimpleNamespace(dynamic_batch_enable=False),
        reward=reward,
        **options,
    )


def rollouts(modules: SimpleNamespace, seed: int):
    """Return (experiences of the micro-batches, rank by rank; the live policy's log-probabilities of each)."""
    g = torch.Generator().manual_seed(seed)
    experiences, live = [], []
    for part in range(RANKS * MICRO):
        own = [part, part + SAMPLES]
        lengths, prompts = [LENGTHS[i] for i in own], [3 if i < SAMPLES else 2 for i in own]
        width = max(p + n for p, n in zip(prompts, lengths, strict=True))
        ids, real, mask = (torch.zeros(2, width, dtype=torch.long) for _ in range(3))
        for row, (p, n) in enumerate(zip(prompts, lengths, strict=True)):
            ids[row, : p + n] = torch.randint(5, 40, (p + n,), generator=g)
            real[row, : p + n] = 1
            mask[row, p : p + n] = 1
            if own[row] == 2:
                mask[row, p + 1 : p + 3] = 0  # a tool wrote them
        mask = mask[:, 1:].bool()

        def normal(scale: float, mask=mask) -> torch.Tensor:
            return scale * torch.randn(mask.shape, generator=g)

        old = (-1.5 - normal(0.7).abs()) * mask
        live.append((old + normal(0.25)) * mask)
        experiences.append(
            modules.experience.Experience(
                sequences=ids, attention_mask=real, action_mask=mask, action_log_probs=old,
                base_action_log_probs=(old + normal(0.2)) * mask, rollout_log_probs=(old + normal(0.1)) * mask,
                rewards=torch.tensor([REWARDS[i] for i in own]), index=own, kl=torch.zeros_like(old),
            )
        )  # fmt: skip
    return experiences, live


def step(source: Path, modules: SimpleNamespace, folder: Path, seed: int, **of_loss) -> None:
    """Advantages, then forward and backward of every micro-batch, each saved by the hook."""
    args, (experiences, live) = arguments(), rollouts(modules, seed)
    names = {"torch": torch, "itertools": itertools, "logger": None, "compute_reward": modules.utils.compute_reward}
    names["apply_length_penalties"] = modules.lengths.apply_length_penalties
    maker_file = source / "openrlhf/trainer/ppo_utils/experience_maker.py"
    maker = SimpleNamespace(
        strategy=SimpleNamespace(args=args), kl_ctl=SimpleNamespace(value=0.0), advantage_estimator="group_norm"
    )
    maker.get_cumulative_returns = types.MethodType(
        function(maker_file, "RemoteExperienceMaker.get_cumulative_returns", names), maker
    )
    advantages = function(maker_file, "RemoteExperienceMaker.compute_advantages_and_returns", names)
    getattr(advantages, "__wrapped__", advantages)(maker, experiences)
    names = {"torch": torch, "fields": fields, "Experience": modules.experience.Experience}
    names |= {name: getattr(modules.loss, name) for name in ("aggregate_loss",)}
    names |= {name: getattr(modules.utils, name) for name in ("compute_approx_kl", "masked_mean")}
    own = function(source / "openrlhf/trainer/ray/ppo_actor.py", "ActorPPOTrainer.training_step", names)
    strategy = SimpleNamespace(
        ring_attn_group=None, optimizer_step=lambda *_, **__: None, get_grad_norm=lambda _: 0.0,
        backward=lambda loss, *_: (loss / MICRO).backward(),  # DeepSpeed
    )  # fmt: skip
    trainer = SimpleNamespace(
        strategy=strategy, args=args, actor_loss_fn=modules.loss.PolicyLoss(**of_loss), aux_loss=False, ema_model=None,
        actor_optim=None, actor_scheduler=SimpleNamespace(get_last_lr=lambda: [1e-6]),
    )  # fmt: skip
    # The whole step's masks as one rank's, with its counts divided by micro-batches: what the all-reduce gives.
    one_rank = SimpleNamespace()
    modules.counts._get_dp_group = lambda _: None
    masks = list(
        modules.counts.iter_grad_accum_global_norm(experiences, one_rank, len(experiences), lambda e: e.action_mask)
    )
    info = {name: value * RANKS if name != "dp_size" else RANKS for name, value in masks[0][1].items()}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number, (experience, log_probs) in enumerate(zip(experiences, live, strict=True)):
        rank, micro = divmod(number, MICRO)
        leaf = log_probs.clone().requires_grad_()

        def actor(*_, leaf=leaf, **__):
            return leaf, SimpleNamespace()

        actor.train = lambda: None
        trainer.actor = actor
        status = own(trainer, experience, args.algo.kl.init_coef, micro, info)
        tensors = {name: value for name, value in vars(experience).items() if isinstance(value, torch.Tensor)}
        more = {"index": experience.index, "n_samples_per_prompt": SAMPLES, "accumulated_gradient": MICRO}
        more |= {"info": {name: value for name, value in experience.info.items() if torch.as_tensor(value).dim() == 0}}
        more |= {"loss_batch_info": info, "policy_loss": status["metrics"]["policy_loss"]}
        more |= {"log_probs": leaf.detach(), "grad_log_probs": leaf.grad / RANKS}  # the mean over ranks
        torch.save({**tensors, **more}, folder / f"rank_{rank}_micro_{micro}.pt")


def main(source: Path, folder: Path) -> None:
    """Write a step of a mean over tokens with a correction, and one of a mean over rows with a dual clip."""
    modules = imported(source)
    corrected = {"is_correction_level": "token", "is_correction_mode": "clip", "is_correction_threshold": [0.9, 1.1]}
    step(source, modules, folder / "token_mean", 0, **corrected)
    step(source, modules, folder / "seq_mean", 1, token_level_loss=False, clip_eps_high=0.28, dual_clip=1.5)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
