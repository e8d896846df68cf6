"""What ranks of tests need: the fork server of `tests.helpers.ranks` imports it once."""

from __future__ import annotations

import gc

import hypothesis  # noqa: F401 (as pytest: the functions of ranks are in modules of tests, 0.1 s each)
import pytest  # noqa: F401
import torch._dynamo  # the first step of an optimizer imports it
import torch.distributed.tensor  # noqa: F401
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import tests.parity.cases  # noqa: F401
import workbench.train.worker  # noqa: F401

get_checkpoint_conversion_mapping("qwen3")  # compiles 700 patterns

gc.collect()
gc.freeze()  # a full pass in a rank would go through all that was imported here, and copy its pages: 0.3 s each
