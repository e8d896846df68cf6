"""verl's engine worker, which updates the actor: ``of_verl.py FOLDER aggregation=MODE [form=nested|padded]``.

It runs on the platform of `verl_on_cpu`. Advantages are the rewards of documents, old log-probabilities those of the
driver's own initial weights: the ratio is 1 in a first step from these, and the loss depends on the weights.
"""

import copy
import os
import tempfile
from functools import partial

import torch
import verl_on_cpu  # noqa: F401  before verl's workers
from transformers import Qwen2Config, Qwen2ForCausalLM
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

from workbench.engines.case import END, EPSILON, PAD, VOCABULARY, EngineStep
from workbench.engines.driver import Refused, load_weights, options, serve, snapshot

torch.distributed.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
RANK, RANKS = torch.distributed.get_rank(), torch.distributed.get_world_size()
OPTIONS = options()


def saved_model(case):
    """Path of a model with the case's initial weights, that model, and one with the driver's own."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": PAD, "eos_token_id": END, "bos_token_id": None}
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        num_key_value_heads=1,
        tie_word_embeddings=False,
        initializer_range=0.2,
        **ids,
        **sizes,
    )
    own = Qwen2ForCausalLM(config)
    model = copy.deepcopy(own)
    load_weights(model, case)
    shared = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(shared)
    if RANK == 0:
        model.save_pretrained(shared[0])
    torch.distributed.barrier()
    return shared[0], model, own


def batch_of(model, case, step):
    """A step's documents as verl pads them: prompts on the left, responses on the right."""
    texts = case.step(step)
    before = max(len(each.prompt) for each in texts) + case.padding
    after = max(len(each.completion) for each in texts) + case.padding
    ids = torch.full((len(texts), before + after), PAD)
    mask = torch.zeros_like(ids)
    for row, each in enumerate(texts):
        place = slice(before - len(each.prompt), before + len(each.completion))
        ids[row, place], mask[row, place] = torch.tensor(each.tokens), 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, before - 1 : -1]
        old = logits.log_softmax(-1).gather(-1, ids[:, before:, None])[..., 0] * mask[:, before:]
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": positions,
        "prompts": ids[:, :before],
        "responses": ids[:, before:],
        "response_mask": mask[:, before:].clone(),
        "advantages": torch.tensor([each.reward for each in texts])[:, None].expand(-1, after).contiguous(),
        "old_log_probs": old,
    }, before


def nested(data, before):
    """A batch of nested tensors, as verl's trainer over a transfer queue keeps it."""
    mask = data.pop("attention_mask").bool()
    here = {"input_ids": mask, "position_ids": mask, "prompts": mask[:, :before]}
    fields = {
        name: torch.nested.nested_tensor(
            [row[kept] for row, kept in zip(values, here.get(name, mask[:, before:]), strict=True)],
            layout=torch.jagged,
        )
        for name, values in data.items()
    }
    return tu.get_tensordict(fields | {"loss_mask": fields["response_mask"]})


def worker_of(case, path):
    exact = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=path,
            load_tokenizer=False,
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            use_dynamic_bsz=False,
            mixed_precision=exact,
            micro_batch_size_per_gpu=case.each,
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=case.learning_rate,
            clip_grad=case.clip if case.clip is not None else 1e9,
            optimizer="SGD" if case.optimizer == "sgd" else "AdamW",
            optimizer_impl="torch.optim",
            weight_decay=0.0,
            override_optimizer_config={"momentum": 0.0} if case.optimizer == "sgd" else {"eps": EPSILON},
        ),
        checkpoint_config=CheckpointConfig(),
    )
    actor = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=OPTIONS.get("aggregation", "token-mean"),
        **dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"), 100.0),
    )
    worker = TrainingWorker(config)
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    return worker


def fields_of(model, case, step):
    """This rank's documents of a step, in verl's form of a batch."""
    batch, width = batch_of(model, case, step)
    rows = list(range(RANK, len(case.step(step)), RANKS))
    data = {name: values[rows] for name, values in batch.items()}
    fields = (
        nested(data, width) if OPTIONS.get("form") == "nested" else left_right_2_no_padding(tu.get_tensordict(data))
    )
    count = len(case.step(step))
    named = {"temperature": 1.0, "global_batch_size": count, "mini_batch_size": count, "compute_loss": True}
    tu.assign_non_tensor(fields, **named)
    return fields


def resumed(case, worker, path):
    """A new worker, from what verl's checkpoint manager saved of this one."""
    shared = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(shared)
    worker.save_checkpoint(shared[0], global_step=case.resume_after)
    worker = worker_of(case, path)
    worker.load_checkpoint(shared[0])
    return worker


def run(case):
    if case.packed:
        raise Refused("use_remove_padding needs flash-attn, which needs a GPU")
    path, model, own = saved_model(case)
    before, logged = snapshot(model.named_parameters()), []
    worker = worker_of(case, path)
    for step in range(case.steps):
        output = worker.train_mini_batch(fields_of(own, case, step))
        logged.append(tu.get(output, "metrics") if output is not None and RANK == 0 else {})
        if case.resume_after == step + 1:
            worker = resumed(case, worker, path)
    losses, norms = (
        tuple(float(value) for metrics in logged for value in list(metrics.get(name, ()))[:1])
        for name in ("loss", "grad_norm")
    )
    state = worker.engine.module.state_dict()
    after = snapshot((name, state[name]) for name in before)
    return EngineStep(before, after, losses, norms, learning_rate=case.learning_rate)


serve(run)
torch.distributed.destroy_process_group()
