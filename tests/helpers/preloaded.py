"""What ranks of tests need: the fork server of `tests.helpers.ranks` imports it once."""

from __future__ import annotations

import gc

import hypothesis  # noqa: F401 (as pytest: the functions of ranks are in modules of tests, 0.1 s each)
import pytest  # noqa: F401
import torch._dynamo  # the first step of an optimizer imports it
import torch.distributed.tensor
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import tests.parity.cases  # noqa: F401
import workbench.train.worker  # noqa: F401
from tests.helpers.interpreted_triton import has_gpu
from workbench.policy.model import load_policy

get_checkpoint_conversion_mapping("qwen3")  # compiles 700 patterns

torch.set_num_threads(1)  # a fork has no threads of a pool
if not has_gpu():  # a policy initializes CUDA, and forks could not use it
    load_policy("tiny-qwen3", precision="float64", tied=True, seed=3)  # prepared once; it starts no thread of autograd

gc.collect()
gc.freeze()  # a full pass in a rank would go through all that was imported here, and copy its pages: 0.3 s each
