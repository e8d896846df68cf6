"""Write the dump in this folder with NeMo-RL's own code: advantages, loss, and `Logger.log_batched_dict_as_jsonl`.

    git clone https://github.com/NVIDIA-NeMo/RL; git -C RL checkout 7ea279ab
    pip install torch==2.13.0 numpy "transformers<5.12" ray pillow pyzmq nvidia-ml-py
    PYTHONPATH=RL python tests/dumps/nemo_rl/write.py RL tests/dumps/nemo_rl

`BatchedDataDict` is imported. The modules of the logger, the estimator and the loss import trackers and vLLM, so their
functions are executed from their source files (own_source.py). The fields are those of grpo.py; a hook has added
`curr_logprobs` and `grad_curr_logprobs` to log_data. Two prompts, a masked sample, tokens of a tool, padding.
"""

import enum
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

sys.path.insert(0, str(Path(__file__).parents[1]))
from own_source import function

PROMPTS = ([7, 8, 9], [4, 5])
RESPONSES = (6, 3, 5, 4, 7, 2)
REWARDS = (1.0, 0.0, 0.5, 0.0, 1.0, 1.0)


def of_source(source: Path) -> tuple[Any, Any, Any]:
    """Return the logger's function, the estimator's class and the loss's class."""
    root = source / "nemo_rl"
    names = {
        "torch": torch,
        "np": np,
        "os": os,
        "json": json,
        "enum": enum,
        "Any": Any,
        "BatchedDataDict": BatchedDataDict,
    }
    log = function(root / "utils/logger.py", "Logger.log_batched_dict_as_jsonl", names)
    utils = root / "algorithms/utils.py"
    for name in ("masked_mean", "calculate_kl", "calculate_baseline_and_std_per_prompt"):
        names[name] = function(utils, name, names)
    for name in ("LossType", "MetricNormalizer", "LossInputType"):
        names[name] = function(root / "algorithms/loss/interfaces.py", name, names)
    names |= {"LossFunction": object, "Tensor": torch.Tensor, "TypeVar": TypeVar}
    estimator = function(root / "algorithms/advantage_estimator.py", "GRPOAdvantageEstimator", names)
    return log, estimator, function(root / "algorithms/loss/loss_functions.py", "ClippedPGLossFn", names)


def main(source: Path, folder: Path) -> None:
    """Write one step of six samples."""
    log, estimator, loss_class = of_source(source)
    generator = torch.Generator().manual_seed(2)
    rows, width = len(RESPONSES), 12
    ids, mask = torch.zeros(rows, width, dtype=torch.long), torch.zeros(rows, width)
    lengths = []
    for row, response in enumerate(RESPONSES):
        prompt = PROMPTS[row // 3]
        ids[row, : len(prompt) + response] = torch.tensor([*prompt, *range(20, 20 + response)])
        mask[row, len(prompt) : len(prompt) + response] = 1
        lengths.append(len(prompt) + response)
    mask[0, 5:7] = 0  # a tool wrote these

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(rows, width, generator=generator)

    old = -1.5 - normal(0.7).abs()
    rewards, sample_mask = torch.tensor(REWARDS), torch.tensor([1.0, 1, 1, 1, 1, 0])
    prompts = torch.tensor([[7, 8, 9]] * 3 + [[4, 5, 0]] * 3)
    options = SimpleNamespace(use_leave_one_out_baseline=True, normalize_rewards=True)
    data = BatchedDataDict(
        {
            "input_ids": ids,
            "token_mask": mask,
            "sample_mask": sample_mask,
            "advantages": estimator(options, None).compute_advantage(prompts, rewards, mask),
            "prev_logprobs": old,
            "generation_logprobs": old + normal(0.1),
        }
    )
    config = {
        "disable_ppo_ratio": False,
        "token_level_loss": True,
        "sequence_level_importance_ratios": False,
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.28,
        "ratio_clip_c": None,
        "reference_policy_kl_penalty": 0.0,
        "reference_policy_kl_type": "k3",
        "kl_input_clamp_value": 20.0,
        "kl_output_clamp_value": 10.0,
        "use_kl_in_reward": False,
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 1.1,
        "truncated_importance_sampling_ratio_min": None,
        "use_on_policy_kl_approximation": False,
        "force_on_policy_ratio": False,
        "use_cispo": False,
        "positive_example_nll_weight": 0.0,
    }
    current = (old + normal(0.4)).requires_grad_()
    valid = mask[:, 1:] * sample_mask[:, None]
    loss, _ = loss_class(SimpleNamespace(**config))(current[:, 1:], data, sample_mask.sum(), valid.sum())
    loss.backward()
    log_data = {
        "content": [f"response {row}" for row in range(rows)],
        "rewards": rewards.tolist(),
        "input_lengths": lengths,
        "token_ids": ids.tolist(),
        "token_loss_mask": mask.tolist(),
        "sample_loss_mask": sample_mask.tolist(),
        "advantages": data["advantages"].tolist(),
        "generation_logprobs": data["generation_logprobs"].tolist(),
        "prev_logprobs": old.tolist(),
        "curr_logprobs": current.tolist(),
        "grad_curr_logprobs": current.grad.tolist(),
    }
    log(SimpleNamespace(base_log_dir=str(folder)), log_data, "train_data_step3.jsonl")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
