"""Trainers of transformers and TRL, and a loop of Accelerate: ``of_hf.py FOLDER kind=NAME [NAME=VALUE ...]``.

Weights are read before `train` and after it; losses and norms are those that the trainer logs.
"""

import contextlib
import gc
import tempfile

import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

from workbench.engines.case import END, EPSILON, PAD, VOCABULARY, EngineStep, padded
from workbench.engines.driver import Refused, load_weights, options, serve, snapshot

OPTIONS = options()
WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(2, VOCABULARY))]
MODERN = int(transformers.__version__.split(".")[0]) >= 5


def model_of():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        num_key_value_heads=1,
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=None,
        tie_word_embeddings=False,
        initializer_range=0.2,
        **sizes,
    )
    return Qwen2ForCausalLM(config)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def text(ids):
    return " ".join(WORDS[token] for token in ids)


def settings(case, folder, **more):
    common = {
        "output_dir": folder,
        "per_device_train_batch_size": case.each,
        "gradient_accumulation_steps": case.accumulation,
        "max_steps": case.steps,
        "learning_rate": case.learning_rate,
        "lr_scheduler_type": "constant",
        "optim": "sgd" if case.optimizer == "sgd" else "adamw_torch",
        "weight_decay": 0.0,
        "adam_epsilon": EPSILON,
        "max_grad_norm": case.clip if case.clip is not None else 1e9,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "steps" if case.resume_after else "no",
        "save_steps": case.resume_after or 500,
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 0,
        "label_smoothing_factor": float(OPTIONS.get("smoothing", 0.0)),
    }
    if MODERN:
        common["train_sampling_strategy"] = "sequential"
    return common | more


def rows_of(case):
    """Rows as data sets of trainers; labels are -100 in prompts."""
    return [
        {"input_ids": list(each.tokens), "labels": [*[-100] * len(each.prompt), *each.completion]}
        for each in case.documents
    ]


def dataset(rows):
    from datasets import Dataset

    return Dataset.from_list(rows)


def hf(case, model, folder):
    if case.packed:
        raise Refused("the trainer does not pack")
    width = max(len(each.tokens) for each in case.documents) if case.padding else 0

    def collate(rows):
        from workbench.engines.case import Text

        texts = []
        for row in rows:
            start = sum(label == -100 for label in row["labels"])
            texts.append(Text(tuple(row["input_ids"][:start]), tuple(row["input_ids"][start:])))
        return padded(texts, padding=case.padding, width=width)

    args = TrainingArguments(**settings(case, folder))
    return Trainer(model=model, args=args, train_dataset=dataset(rows_of(case)), data_collator=collate)


def sft(case, model, folder):
    import trl

    more = {"bf16": False, "max_length": 64, "loss_type": OPTIONS.get("loss_type", "nll")}
    if case.padding:
        more["pad_to_multiple_of"] = 32
    rows = [
        {"input_ids": list(t.tokens), "completion_mask": [*[0] * len(t.prompt), *[1] * len(t.completion)]}
        for t in case.documents
    ]
    if case.packed:
        together = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
        more |= {"packing": True, **together, "max_length": sum(len(t.tokens) for t in case.documents)}
    args = trl.SFTConfig(**settings(case, folder, **more))
    return trl.SFTTrainer(model=model, args=args, train_dataset=dataset(rows), processing_class=tokenizer())


def dpo(case, model, folder):
    import trl

    if case.each % 2:
        raise Refused("a micro-batch is of whole pairs")
    if case.packed:
        raise Refused("the trainer does not pack")
    pairs = [case.documents[at : at + 2] for at in range(0, len(case.documents), 2)]
    rows = [
        {"prompt": text(a.prompt), "chosen": " " + text(a.completion), "rejected": " " + text(b.completion)}
        for a, b in pairs
    ]
    more = {"bf16": False, "beta": 0.5, "per_device_train_batch_size": case.each // 2}
    if "loss_type" in OPTIONS:
        more["loss_type"] = OPTIONS["loss_type"].split("+")
    if case.padding:
        more["pad_to_multiple_of"] = 32
    args = trl.DPOConfig(**settings(case, folder, **more))
    reference = model_of()
    with torch.no_grad():
        reference.lm_head.weight.mul_(1.1)
    return trl.DPOTrainer(
        model=model, ref_model=reference, args=args, train_dataset=dataset(rows), processing_class=tokenizer()
    )


def grpo(case, model, folder):
    import trl

    if case.packed:
        raise Refused("the trainer does not pack")
    if case.only_loss:
        raise Refused("the ratio is 1 in each new batch: the loss's value does not depend on the weights")
    if case.steps > 1:
        raise Refused("the driver's completions are fixed for one step")
    more = {
        "bf16": False,
        "num_generations": 2,
        "max_completion_length": 16,
        "beta": 0.0,
        "shuffle_dataset": False,
        "loss_type": OPTIONS.get("loss_type", "dapo"),
        "epsilon": 100.0,
        "log_completions": False,
    }
    if "entropy" in OPTIONS:
        more["entropy_coef"] = float(OPTIONS["entropy"])
    if case.padding:
        more["pad_to_multiple_of"] = 32
    prompts = [text(case.documents[at].prompt) for at in range(0, len(case.documents), 2)]
    given = {text(case.documents[at].prompt): case.documents[at : at + 2] for at in range(0, len(case.documents), 2)}

    def rollouts(asked, trainer):
        seen, chosen = {}, []
        first = trainer.accelerator.process_index * len(asked) % 2  # a group may lie on two ranks
        for prompt in asked:
            number = seen.get(prompt, first if not seen else 0)
            chosen.append(given[prompt][number])
            seen[prompt] = number + 1
        return {
            "prompt_ids": [list(each.prompt) for each in chosen],
            "completion_ids": [list(each.completion) for each in chosen],
            "logprobs": [[0.0] * len(each.completion) for each in chosen],
        }

    def rewards(prompts, completions, completion_ids, **_):
        by_tokens = {(text(t.prompt), tuple(t.completion)): t.reward for t in case.documents}
        return [by_tokens[p, tuple(ids)] for p, ids in zip(prompts, completion_ids, strict=True)]

    args = trl.GRPOConfig(**settings(case, folder, **more))
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=args,
        train_dataset=dataset([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer(),
        rollout_func=rollouts,
    )


BUILD = {"trainer": hf, "sft": sft, "dpo": dpo, "grpo": grpo}


def optimizer_of(case, parameters):
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=case.learning_rate)
    return torch.optim.AdamW(parameters, lr=case.learning_rate, weight_decay=0.0, eps=EPSILON)


def accelerate_loop(case, model):
    """The loop of Accelerate's guide to accumulation with batches of several sizes; return its model and norms."""
    import accelerate

    from workbench.engines.driver import plain_norm

    if case.packed:
        raise Refused("packing is the caller's")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=case.accumulation)
    net, optimizer = accelerator.prepare(model, optimizer_of(case, model.parameters()))
    norms = []
    for step in range(case.steps):
        tokens = sum(len(each.completion) for each in case.step(step))
        parts = case.micro_batches(step, accelerator.process_index)
        for number, texts in enumerate(parts):
            batch = padded(texts, padding=case.padding)
            with accelerator.no_sync(net) if number + 1 < len(parts) else contextlib.nullcontext():
                labels = batch["labels"][:, 1:].flatten()
                logits = net(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
                total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
                loss = total * accelerator.gradient_accumulation_steps * accelerator.num_processes / tokens
                accelerator.backward(loss)
        size = accelerator.clip_grad_norm_(net.parameters(), case.clip if case.clip is not None else 1e9)
        norms.append(float(size) if size is not None else plain_norm(net.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        if case.resume_after == step + 1:
            shared = [tempfile.mkdtemp()]
            torch.distributed.broadcast_object_list(shared)
            accelerator.save_state(shared[0])
            accelerator.free_memory()
            model = model_of()
            net, optimizer = accelerator.prepare(model, optimizer_of(case, model.parameters()))
            accelerator.load_state(shared[0])
    return model, tuple(norms)


def run(case):
    model = model_of()
    load_weights(model, case)
    model.config.use_cache = False
    before = snapshot(model.named_parameters())
    if OPTIONS["kind"] == "accelerate":
        model, norms = accelerate_loop(case, model)
        return EngineStep(before, snapshot(model.named_parameters()), (), norms, learning_rate=case.learning_rate)
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        if torch.distributed.is_initialized():
            torch.distributed.broadcast_object_list(shared)
        folder = shared[0]
        trainer = BUILD[OPTIONS["kind"]](case, model, folder)
        if case.resume_after:
            trainer.train()  # to the end; the checkpoint after the first step is what the next one resumes from
            again = model_of()
            load_weights(again, case)
            trainer = BUILD[OPTIONS["kind"]](case, again, folder)
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{case.resume_after}")
            model = again
        else:
            trainer.train()
        history = [entry for entry in trainer.state.log_history if "grad_norm" in entry and "loss" in entry]
        after = snapshot(model.named_parameters())
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
    del trainer
    gc.collect()
    losses, norms = (tuple(float(entry[key]) for entry in history) for key in ("loss", "grad_norm"))
    return EngineStep(before, after, losses, norms, learning_rate=case.learning_rate)


serve(run)
