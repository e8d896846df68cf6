"""verl's engine worker, which updates the actor, on a tiny model: ``of_verl.py update FOLDER [CHANGE=VALUE ...]``.

Prints a hash of the final weights. ``plain=1``: without a recorder; ``by_hand=1``: gradients by autograd alone, too.
It runs on the platform of `verl_on_cpu`.
"""

import hashlib
import os
import sys
from functools import partial

import torch
import transformers
import verl
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from experiments.engine_matrix.drivers import verl_on_cpu  # noqa: F401  before verl's workers

# isort: split
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

from workbench.attach.verl import record

assert (verl.__version__, transformers.__version__) == ("0.9.1", "5.9.0")
FOLDER = sys.argv[2]
CHANGES = dict(pair.split("=") for pair in sys.argv[3:])

torch.distributed.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
RANK, RANKS = torch.distributed.get_rank(), torch.distributed.get_world_size()
ROWS, STEPS, PROMPT, RESPONSE = 8, 3, 5, 6
PATH = f"{FOLDER}-model"


def saved_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=32, num_key_value_heads=1, bos_token_id=None, tie_word_embeddings=False, **sizes)
    model = Qwen2ForCausalLM(config)
    if RANK == 0:
        model.save_pretrained(PATH)
    torch.distributed.barrier()
    return model


def logprobs(model, batch):
    """Of the responses' tokens, [rows, RESPONSE], of rows padded on the left and on the right."""
    given = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    logits = model(**given).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(-1, batch["responses"][..., None])[..., 0]


def rollouts(model):
    """Prompts padded on the left, responses on the right, one with a gap in its mask; advantages of both signs."""
    draw = torch.Generator().manual_seed(1)
    rows = ROWS * STEPS
    ids = torch.randint(2, 32, (rows, PROMPT + RESPONSE), generator=draw)
    before, after = torch.randint(1, PROMPT + 1, (rows, 1), generator=draw), 2 + torch.arange(rows)[:, None] % 5
    places = torch.arange(PROMPT + RESPONSE)
    mask = ((places >= PROMPT - before) & (places < PROMPT + after)).long()
    trained = mask[:, PROMPT:].clone()
    trained[3, 1] = 0
    batch = {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "prompts": (ids * mask)[:, :PROMPT],
        "responses": (ids * mask)[:, PROMPT:],
        "response_mask": trained,
        "advantages": torch.randn(rows, 1, generator=draw).expand(rows, RESPONSE).contiguous(),
    }
    with torch.no_grad():
        noise = 0.3 * torch.randn(rows, RESPONSE, generator=draw)
        return batch | {"old_log_probs": (logprobs(model, batch) + noise) * mask[:, PROMPT:]}


def by_hand(model, batch):
    """Gradients of the first step by autograd alone: PPO's clipped loss, clipped twice, mean over all tokens."""
    batch = {name: values[:ROWS] for name, values in batch.items()}
    advantages, trained = batch["advantages"], batch["response_mask"].bool()
    ratio = (logprobs(model, batch) - batch["old_log_probs"]).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * 3), loss)
    loss = loss[trained].mean()
    loss.backward()
    save_file(
        {name: value.grad for name, value in model.named_parameters()} | {"loss": loss.detach()},
        f"{FOLDER}.safetensors",
    )


def worker_of(actor):
    exact = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    each = int(CHANGES.get("each", 2))
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=PATH,
            load_tokenizer=False,
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            mixed_precision=exact,
            use_dynamic_bsz="dynamic" in CHANGES,
            max_token_len_per_gpu=int(CHANGES.get("dynamic", 0)),
            micro_batch_size_per_gpu=each,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, clip_grad=float(CHANGES.get("clip", 0.05))),
        checkpoint_config=CheckpointConfig(),
    )
    worker = TrainingWorker(config)
    worker.reset()
    worker.set_loss_fn(partial(times if "times" in CHANGES else ppo_loss, config=actor))
    return worker


def times(config, model_output, data, dp_group=None):
    """A planted mistake: the loss times the micro-batches of its step."""
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    return loss * (ROWS // RANKS // len(data)), metrics


def without_padding(data):
    """A batch of nested tensors, as verl's trainer over a transfer queue keeps it."""
    mask = data.pop("attention_mask").bool()
    here = {"input_ids": mask, "position_ids": mask, "prompts": mask[:, :PROMPT]}
    fields = {
        name: torch.nested.nested_tensor(
            [row[kept] for row, kept in zip(values, here.get(name, mask[:, PROMPT:]), strict=True)],
            layout=torch.jagged,
        )
        for name, values in data.items()
    }
    return tu.get_tensordict(fields | {"loss_mask": fields["response_mask"]})


def on_this_rank(batch):
    """This rank's share of each mini-batch, in verl's form of a batch."""
    each = ROWS // RANKS
    rows = [step * ROWS + RANK * each + row for step in range(STEPS) for row in range(each)]
    form = without_padding if "nested" in CHANGES else left_right_2_no_padding
    data = form(tu.get_tensordict({name: values[rows] for name, values in batch.items()}))
    named = {"temperature": 1.0, "global_batch_size": ROWS, "mini_batch_size": ROWS, "compute_loss": True}
    tu.assign_non_tensor(data, **named)
    return data


clip = float(CHANGES.get("clip_ratio", 0.2))
actor = FSDPActorConfig(
    strategy="fsdp2",
    rollout_n=1,
    ppo_micro_batch_size_per_gpu=1,
    loss_agg_mode=CHANGES.get("aggregation", "token-mean"),
    clip_ratio=clip,
    clip_ratio_low=clip,
    clip_ratio_high=clip,
)
plain = saved_model()
batch = rollouts(plain)
if "by_hand" in CHANGES and RANK == 0:
    by_hand(plain, batch)
worker = worker_of(actor)
recorder = None if "plain" in CHANGES else record(FOLDER, worker, gradients="full")
worker.train_mini_batch(on_this_rank(batch))
recorder and recorder.close()
whole = {name: value.full_tensor() for name, value in worker.engine.module.state_dict().items()}
weights = b"".join(value.detach().numpy().tobytes() for value in whole.values())
sys.stdout.write(f"weights {hashlib.sha256(weights).hexdigest()}\n" if RANK == 0 else "")
torch.distributed.destroy_process_group()
