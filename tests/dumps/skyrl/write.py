"""Write the dumps in this folder with SkyRL's own code: batch, advantages, division, loss, metrics, `dump_data`.

    pip install --no-deps --target skyrl skyrl==0.3.0; pip install torch==2.13.0 jaxtyping loguru omegaconf transformers
    python tests/dumps/skyrl/write.py skyrl tests/dumps/skyrl

`TrainingInputBatch` and its functions are imported, without the ``__init__`` of the packages above, which import
engines; methods of trainer and worker are executed from their source files (own_source.py) on objects that have their
attributes. Eight sequences of three prompts, one of which a tool wrote in part; without the hook seven, padded to eight
for two ranks. The hook is what a user adds to keep rewards, and the worker's log-probabilities with their gradient: see
`Dumping`.
"""

import importlib
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from own_source import function

TRAINER, WORKER = "skyrl/train/trainer.py", "skyrl/backends/skyrl_train/workers/worker.py"
LOSSES = "skyrl/backends/skyrl_train/utils/ppo_utils.py"
UIDS = ["a", "a", "a", "b", "b", "c", "c", "c"]
LENGTHS = (6, 3, 5, 4, 2, 7, 1, 3)
REWARDS = (1.0, 0.0, 0.5, 0.0, 1.0, 0.25, 1.0, 0.75)
MICRO = 2


def imported(source: Path) -> SimpleNamespace:
    """Import SkyRL's modules of data and options, without the ``__init__`` of their packages."""
    for name in (
        "skyrl",
        "skyrl.backends",
        "skyrl.backends.skyrl_train",
        "skyrl.backends.skyrl_train.utils",
        "skyrl.train",
    ):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(source / name.replace(".", "/"))]
    of_train = importlib.import_module("skyrl.backends.skyrl_train.training_batch")
    utils = "skyrl.backends.skyrl_train.utils"
    return SimpleNamespace(
        batch=of_train,
        torch_utils=importlib.import_module(f"{utils}.torch_utils"),
        correction=importlib.import_module(f"{utils}.off_policy_correction_utils"),
        preprocess=importlib.import_module("skyrl.train.dataset.preprocess"),
    )


def algorithm(**options) -> SimpleNamespace:
    """`trainer.algorithm`, with the defaults of 0.3.0."""
    correction = dict.fromkeys(
        f"{name}_{side}"
        for name in ("outlier_token_is_threshold", "token_mask_is_threshold")
        for side in ("low", "high")
    )
    correction |= {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.1, "sequence_mask_metric": None}
    defaults = {
        "advantage_estimator": "grpo", "grpo_norm_by_std": True, "gamma": 1.0, "lambd": 1.0,
        "advantage_batch_normalize": False, "loss_reduction": "token_mean", "max_seq_len": None,
        "policy_loss_type": "regular", "eps_clip_low": 0.2, "eps_clip_high": 0.2, "clip_ratio_c": 3.0,
        "use_kl_loss": True, "kl_loss_coef": 0.05, "kl_estimator_type": "k3", "temperature": 1.0,
        "use_entropy_loss": False, "entropy_loss_coef": 0.01, "off_policy_correction": SimpleNamespace(**correction),
    }  # fmt: skip
    return SimpleNamespace(**(defaults | options))


class Losses:
    """Functions of ppo_utils.py, executed from the file: importing it starts a Ray actor."""

    def __init__(self, source: Path, modules: SimpleNamespace) -> None:
        from collections import defaultdict
        from typing import Optional

        names = {"torch": torch, "defaultdict": defaultdict, "Optional": Optional}
        names |= {"safe_exp_delta": modules.torch_utils.safe_exp_delta, "masked_mean": modules.torch_utils.masked_mean}
        names |= {"apply_off_policy_correction": modules.correction.apply_off_policy_correction}
        kept = lambda _: lambda function: function  # noqa: E731  registration, which is Ray's
        kinds = SimpleNamespace(REGULAR=0, DUAL_CLIP=0, GRPO=0)
        names |= {"register_policy_loss": kept, "register_advantage_estimator": kept}
        names |= {"PolicyLossType": kinds, "AdvantageEstimator": kinds}
        names["reduce_loss"] = function(source / LOSSES, "reduce_loss", names)
        wanted = (
            "ppo_policy_loss", "compute_approx_kl", "apply_loss_reduction_to_advantages_minibatch",
            "compute_grpo_outcome_advantage",
        )  # fmt: skip
        for name in wanted:
            setattr(self, name, function(source / LOSSES, name, names))

    def compute_advantages_and_returns(self, *, adv_estimator: str, **arguments):
        """Look the estimator up, as the registry does."""
        assert adv_estimator == "grpo"
        return self.compute_grpo_outcome_advantage(**arguments)


def rollouts(modules: SimpleNamespace, seed: int, rows: int = len(UIDS)):
    """Return the batch as `convert_to_training_input` builds it, with log-probabilities of three policies."""
    g = torch.Generator().manual_seed(seed)
    uids, lengths = UIDS[:rows], LENGTHS[:rows]

    def normal(n: int, scale: float) -> torch.Tensor:
        return scale * torch.randn(n, generator=g)

    prompts = [[5 + ord(uid) - ord("a")] * (2 + (uid == "b")) for uid in uids]
    responses = [torch.randint(10, 40, (n,), generator=g).tolist() for n in lengths]
    masks = [[1] * n for n in lengths]
    masks[2][1:3] = [0, 0]  # a tool wrote them
    old = [-1.5 - normal(n, 0.7).abs() for n in lengths]
    sampler = [(of_row + normal(len(of_row), 0.1)).tolist() for of_row in old]
    rewards = [[0.0] * (n - 1) + [reward] for n, reward in zip(lengths, REWARDS, strict=False)]
    tensors = modules.preprocess.convert_prompts_responses_to_batch_tensors(
        SimpleNamespace(pad_token_id=0), prompts, responses, rewards, masks, sampler
    )
    names = ("sequences", "attention_mask", "response_mask", "rewards", "loss_mask", "rollout_logprobs")
    batch = modules.batch.TrainingInputBatch(dict(zip(names, tensors, strict=False)) | {"rollout_expert_indices": None})
    width = tensors[2].shape[1]

    def right(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([torch.cat([torch.zeros(width - len(row)), row]) for row in rows])

    batch["action_log_probs"] = right(old)
    batch["base_action_log_probs"] = right([of_row + normal(len(of_row), 0.2) for of_row in old])
    batch["values"] = None
    live = right([of_row + normal(len(of_row), 0.25) for of_row in old])
    batch.metadata = {"uids": list(uids), "response_length": width}
    batch.metadata["avg_response_length"] = sum(lengths) / rows
    batch.metadata["policy_mini_batch_boundaries"] = [(0, rows)]
    batch.metadata["policy_prompt_boundaries"] = modules.preprocess.compute_prompt_boundaries(uids)
    return modules.batch.pad_training_input_batch(batch, -rows % 2), live


class Dumping:
    """A trainer with the hook that a user adds to `RayPPOTrainer`: it keeps rewards, and dumps after the update."""

    def __init__(self, source: Path, modules: SimpleNamespace, options: SimpleNamespace, folder: Path) -> None:
        self.losses, self.modules, self.source = Losses(source, modules), modules, source
        generator = SimpleNamespace(step_wise_trajectories=False)
        of_trainer = SimpleNamespace(algorithm=options, micro_train_batch_size_per_gpu=MICRO, export_path=str(folder))
        self.cfg, self.all_metrics = SimpleNamespace(trainer=of_trainer, generator=generator), {}
        names = {"torch": torch, "ppo_utils": self.losses, "logger": SimpleNamespace(info=lambda _: None), "Path": Path}
        name = "apply_loss_reduction_to_advantages_minibatch"
        names[name] = getattr(self.losses, name)
        for method in ("compute_advantages_and_returns", "_normalize_advantages", "dump_data"):
            own = function(source / TRAINER, f"RayPPOTrainer.{method}", names)
            setattr(self, method.strip("_"), types.MethodType(getattr(own, "__wrapped__", own), self))

    def step(self, batch, live: torch.Tensor, name: str) -> None:
        """Advantages, division, update on one rank, dump."""
        rewards, uids = batch["rewards"], batch.metadata["uids"]
        batch = self.compute_advantages_and_returns(batch)
        batch["token_level_rewards"], batch.metadata["prompt_uids"] = rewards, uids  # the hook
        batch.metadata |= {"dp_size": 1, "micro_train_batch_size_per_gpu": MICRO}
        batch.pop("rewards")
        batch.metadata.pop("uids")
        advantages = batch["advantages"]
        batch = self.normalize_advantages(
            batch, batch.metadata["policy_mini_batch_boundaries"], batch.metadata["policy_prompt_boundaries"]
        )
        batch.metadata["status"], batch["log_probs"], batch["grad_log_probs"] = self.update(batch, live)
        batch["advantages"] = advantages
        self.dump_data(batch, name)

    def update(self, batch, live: torch.Tensor):
        """Forward and backward of every micro-batch by the worker's own method; its metrics, reduced by its own."""
        options, outputs, gradients = self.cfg.trainer.algorithm, {}, []
        cuda = SimpleNamespace(current_device=lambda: "cpu")
        patched = SimpleNamespace(**{**vars(torch), "cuda": cuda, "autocast": lambda **_: nullcontext()})
        names = {"torch": patched, "masked_mean": self.modules.torch_utils.masked_mean}
        names |= {"compute_approx_kl": self.losses.compute_approx_kl}
        names["compute_minibatch_rollout_logprob_diff_metrics"] = lambda *_: {}
        micro = function(self.source / WORKER, "PolicyWorkerBase._forward_backward_micro", names)
        reduced = {"Dict": dict, "List": list, "MEAN_LOSS_METRICS": ()}
        reduce = function(self.source / "skyrl/backends/skyrl_train/workers/worker_utils.py", "reduce_metrics", reduced)
        for start in range(0, len(live), MICRO):
            own = batch[start : start + MICRO]
            leaf = live[start : start + MICRO].clone().requires_grad_()
            width = leaf.shape[1]
            entropy = torch.zeros(len(leaf), own["sequences"].shape[1])

            def model(*_, leaf=leaf, entropy=entropy, **__):
                model.train = lambda: None
                return leaf, {"entropy": entropy}

            model.train = lambda: None
            experience = SimpleNamespace(
                to_device=lambda _: None, sequences=own["sequences"], attention_mask=own["attention_mask"],
                action_log_probs=own["action_log_probs"], base_action_log_probs=own["base_action_log_probs"],
                advantages=own["advantages"], num_actions=width, loss_mask=own["loss_mask"],
                action_mask=own["response_mask"], rollout_logprobs=own["rollout_logprobs"],
                pixel_values=None, image_grid_thw=None,
            )  # fmt: skip
            worker = SimpleNamespace(
                model=model, cfg=SimpleNamespace(algorithm=options), policy_loss_fn=self.losses.ppo_policy_loss,
                mesh_rank=SimpleNamespace(dp_size=1), optimizer=None,
                strategy=SimpleNamespace(backward=lambda loss, *_: loss.backward()),
                scheduler=SimpleNamespace(get_last_lr=lambda: [1e-6]),
            )  # fmt: skip
            status = micro(worker, experience, len(leaf) / len(live))
            status.pop("loss_fn_outputs")
            for key, value in status.items():
                outputs.setdefault(key, []).append(value)
            gradients.append(leaf.grad)
        return reduce(outputs, sum_loss_metrics=True), live, torch.cat(gradients)


def main(source: Path, folder: Path) -> None:
    """Write a step of two reductions with the hook, and one as SkyRL writes it without."""
    modules = imported(source)
    for seed, (name, options) in enumerate(
        {
            "token_mean": algorithm(),
            "sequence_mean": algorithm(loss_reduction="sequence_mean", policy_loss_type="dual_clip", clip_ratio_c=1.5),
        }.items()
    ):
        trainer = Dumping(source, modules, options, folder)
        trainer.step(*rollouts(modules, seed), name)
    batch, _ = rollouts(modules, 2, rows=7)
    trainer = Dumping(source, modules, algorithm(), folder)
    batch = trainer.compute_advantages_and_returns(batch)
    batch.pop("rewards")
    batch.metadata.pop("uids")
    trainer.dump_data(batch, "global_step_1_training_input")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
