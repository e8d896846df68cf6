"""What ranks of tests need, loaded once by the fork server of `tests.helpers.ranks`: libraries, caches, the workbench."""

from __future__ import annotations

import torch._dynamo  # the first step of an optimizer imports it
import torch.distributed.tensor
import transformers.models.qwen3.modeling_qwen3
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import workbench.train.worker  # noqa: F401 (ranks find it loaded)

get_checkpoint_conversion_mapping("qwen3")  # compiles 700 patterns
