"""A GPT model of megatron-core on a CPU: ``of_megatron.py KIND FOLDER [CHANGE=VALUE ...]``; see ``of_deepspeed.py``.

KIND ``train`` is a loop around `GPTModel` in layouts of tp and dp, with torch's DDP and optimizer; ``refused`` prints
the errors of what needs a GPU: the DDP, optimizers, clip, schedule and attention of megatron-core.
"""

import hashlib
import os
import sys
from pathlib import Path

import torch
from megatron.core import package_info, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file
from torch import nn

from workbench import Recorder
from workbench.attach.megatron import tensor_shards

assert package_info.__version__ == "0.16.1"
KIND, FOLDER = sys.argv[1:3]
CHANGES = dict(pair.split("=") for pair in sys.argv[3:])
TP, EACH = int(CHANGES.get("tp", 1)), int(CHANGES.get("each", 1))
CLIP = float(CHANGES.get("clip", 0.2))
ROWS = torch.randint(2, 32, (24, 11), generator=torch.Generator().manual_seed(1))
STEP_ROWS = 8


class CoreAttention(nn.Module):
    """Torch's attention, as the module that a layer spec names: megatron-core's own allocates on a GPU."""

    def __init__(self, **_):
        super().__init__()

    def forward(self, query, key, value, *_, **__):  # [tokens, rows, heads, features]
        parts = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        return nn.functional.scaled_dot_product_attention(*parts, is_causal=True).permute(2, 0, 1, 3).flatten(2)


def model(attention=CoreAttention, **changed):
    gated = "gated" in CHANGES
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        ffn_hidden_size=32,
        tensor_model_parallel_size=TP,
        gated_linear_unit=gated,
        add_bias_linear=not gated,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        **changed,
    )
    spec = get_gpt_layer_local_spec()
    if attention is not None:
        spec.submodules.self_attention.submodules.core_attention = attention
    torch.manual_seed(0)
    return GPTModel(config, spec, 32, 16, share_embeddings_and_output_weights=False)


def loss_of(net, ids):
    """The mean over tokens; the cross entropy over a sharded vocabulary is the model's own."""
    places = torch.arange(ids.shape[1] - 1).expand(len(ids), -1)
    return net(ids[:, :-1], places, None, labels=ids[:, 1:]).mean()


def clip(net):
    """Clip by the norm of the whole model: shards are summed over tp, and parameters of every rank count once."""
    squares = torch.zeros(2)
    for value in net.parameters():
        squares[int(getattr(value, "tensor_model_parallel", False))] += value.grad.square().sum()
    sharded = squares[1:].clone()
    torch.distributed.all_reduce(sharded, group=parallel_state.get_tensor_model_parallel_group())
    norm = (squares[0] + sharded[0]).sqrt()
    for value in net.parameters():
        value.grad.mul_(min(1.0, CLIP / float(norm)))


def trained():
    net, ranks = model(), parallel_state.get_data_parallel_world_size()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    count = STEP_ROWS // (EACH * ranks)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    shards = tensor_shards(net)
    parallel = nn.parallel.DistributedDataParallel(net, process_group=group) if ranks > 1 else net
    if "plain" not in CHANGES:
        context = {"tp": TP, "dp": ranks, "micro_batches": count, "max_grad_norm": CLIP}
        recorder = Recorder(FOLDER, parallel, optimizer, ranks=group, shards=shards, context=context, gradients="full")
    for ids in ROWS.split(STEP_ROWS):
        optimizer.zero_grad()
        for rows in ids.split(EACH * ranks):
            loss = loss_of(parallel, rows[parallel_state.get_data_parallel_rank() * EACH :][:EACH]) / count
            if "accumulation" in CHANGES:
                loss = loss * count
            if "twice" in CHANGES:
                loss = loss / count
            loss.backward()
        if "plain" not in CHANGES:
            recorder.take_gradients(max_norm=CLIP)
        clip(net)
        optimizer.step()
    return net


def by_hand():
    """Losses and gradients before the clip of every step on one rank, and each step's rows at once."""
    net, seen = model(), {}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for number, ids in enumerate(ROWS.split(STEP_ROWS)):
        optimizer.zero_grad()
        loss = loss_of(net, ids)
        loss.backward()
        seen |= {f"{number}.{name}": value.grad.clone() for name, value in net.named_parameters()}
        seen[f"{number}.loss"] = loss.detach()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
    save_file(seen, f"{FOLDER}-by-hand.safetensors")


def refused():
    """Name and error of each part of megatron-core that needs a GPU, a line each."""
    net = model()
    loss_of(net, ROWS[:2]).backward()
    gradients, ddp = [value.grad for value in net.parameters()], DistributedDataParallelConfig()
    sharded = DistributedDataParallelConfig(use_distributed_optimizer=True)
    optimizer = torch.optim.Adam(net.parameters())
    whole = parallel_state.get_model_parallel_group()
    attempts = {
        "DistributedDataParallel": lambda: DistributedDataParallel(net.config, ddp, net),
        "DistributedOptimizer": lambda: DistributedDataParallel(net.config, sharded, net),
        "FP32Optimizer": lambda: FP32Optimizer(optimizer, OptimizerConfig(), None),
        "get_grad_norm_fp32": lambda: get_grad_norm_fp32(gradients, grad_stats_parallel_group=whole),
        "clip_grad_by_total_norm_fp32": lambda: clip_grad_by_total_norm_fp32(list(net.parameters()), 1.0, 2.0),
        "get_forward_backward_func": lambda: get_forward_backward_func()(
            forward_step_func=lambda rows, net: (loss_of(net, next(rows)), lambda loss: (loss, {})),
            data_iterator=iter(ROWS.split(2)),
            model=net,
            num_microbatches=2,
            seq_length=10,
            micro_batch_size=2,
        ),
        "DotProductAttention": lambda: loss_of(model(attention=None), ROWS[:2]),
        "RotaryEmbedding": lambda: loss_of(with_rotary(), ROWS[:2]),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
            sys.stdout.write(f"{name} runs\n")
        except (AssertionError, RuntimeError) as error:
            sys.stdout.write(f"{name} {type(error).__name__}: {error}\n")


def with_rotary():
    net = model()
    return GPTModel(net.config, get_gpt_layer_local_spec(), 32, 16, position_embedding_type="rope")


Path(FOLDER).parent.mkdir(parents=True, exist_ok=True)
alone = {} if "WORLD_SIZE" in os.environ else {"init_method": f"file://{FOLDER}-store", "rank": 0, "world_size": 1}
torch.distributed.init_process_group("gloo", **alone)
parallel_state.initialize_model_parallel(tensor_model_parallel_size=TP)
if KIND == "refused":
    refused()
elif "by_hand" in CHANGES:
    by_hand()
else:
    weights = b"".join(value.detach().numpy().tobytes() for value in trained().parameters())
    of_ranks = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, hashlib.sha256(weights).hexdigest())
    if torch.distributed.get_rank() == 0:
        sys.stdout.write(f"weights {'-'.join(of_ranks)}\n")
torch.distributed.destroy_process_group()
