"""Trainers of transformers and TRL and a loop of Accelerate on a tiny model.

``of_trl.py KIND FOLDER [CHANGE=VALUE ...]`` prints a hash of the final weights. ``plain=1``: without a recorder.
"""

import hashlib
import sys

import accelerate
import torch
import transformers
import trl
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

from workbench import Recorder
from workbench.attach.transformers import RecorderCallback

assert (transformers.__version__, trl.__version__, accelerate.__version__) == ("5.23.0", "1.16.0", "1.15.0")
KIND, FOLDER = sys.argv[1:3]
CHANGES = dict(pair.split("=") for pair in sys.argv[3:])
WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(30))]


def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=32, num_key_value_heads=1, pad_token_id=0, eos_token_id=1, bos_token_id=None, **sizes
    )
    return Qwen2ForCausalLM(config)


def tokenizer():
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def sentence(number, length):
    return " ".join(WORDS[2 + (7 * number + 3 * place) % 30] for place in range(length))


def settings(**more):
    each = int(CHANGES.get("each", 2))
    common = {
        "output_dir": f"{FOLDER}-trainer",
        "per_device_train_batch_size": each,
        "gradient_accumulation_steps": 8 // each,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 0,
        "max_grad_norm": 0.5,
    }
    return common | more


class MeanOfMicroBatch(Trainer):
    """The known mistake of accumulation: the mean over a micro-batch, although the trainer divides no more."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, None)


def hf():
    kind = MeanOfMicroBatch if "accumulation" in CHANGES else Trainer
    rows = [{"input_ids": ids, "labels": list(ids)} for ids in torch.randint(2, 32, (24, 10)).tolist()]
    return kind(model=model(), args=TrainingArguments(**settings()), train_dataset=Dataset.from_list(rows))


def sft():
    rows = [{"prompt": sentence(n, 3), "completion": " " + sentence(n + 1, 3 + n % 4)} for n in range(24)]
    args = trl.SFTConfig(**settings(bf16=False, completion_only_loss="prompts" not in CHANGES, max_length=32))
    return trl.SFTTrainer(model=model(), args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer())


def dpo():
    rows = [
        {"prompt": sentence(n, 3), "chosen": " " + sentence(n + 1, 4), "rejected": " " + sentence(n + 5, 3 + n % 3)}
        for n in range(24)
    ]
    args = trl.DPOConfig(**settings(bf16=False, beta=float(CHANGES.get("beta", 0.1))))
    return trl.DPOTrainer(
        model=model(), ref_model=model(), args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer()
    )


def even(completions, **_):
    return [float(sum(int(word[1:]) % 2 == 0 for word in text.split() if word[0] == "w")) for text in completions]


def grpo():
    rows = [{"prompt": sentence(n, 3 + n % 2)} for n in range(12)]
    scale = CHANGES.get("scale", "group")
    more = {"bf16": False, "num_generations": 4, "max_completion_length": 6, "scale_rewards": scale, "beta": 0.0}
    args = trl.GRPOConfig(**settings(**more))
    data = Dataset.from_list(rows)
    return trl.GRPOTrainer(
        model=model(), reward_funcs=even, args=args, train_dataset=data, processing_class=tokenizer()
    )


def loop():
    """A plain loop of Accelerate."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    rows = torch.utils.data.DataLoader(torch.randint(2, 32, (24, 10)), batch_size=2)
    net, optimizer, rows = accelerator.prepare(net, optimizer, rows)
    recorder = (
        None if "plain" in CHANGES else Recorder(FOLDER, accelerator.unwrap_model(net), optimizer, gradients="full")
    )
    for ids in rows:
        with accelerator.accumulate(net):
            loss = net(input_ids=ids, labels=ids).loss
            accelerator.backward(loss / 4 if "twice" in CHANGES else loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    recorder and recorder.close()
    return accelerator.unwrap_model(net)


def by_hand(trainer):
    """Gradients of the first step by autograd alone, of the mean over all tokens."""
    net, rows = model(), iter(trainer.get_train_dataloader())
    ids = torch.cat([next(rows)["input_ids"] for _ in range(trainer.args.gradient_accumulation_steps)])
    logits = net(ids[:, :-1]).logits.flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()
    save_file({name: value.grad for name, value in net.named_parameters()}, f"{FOLDER}.safetensors")


torch.manual_seed(1)
if KIND == "accelerate":
    trained = loop()
else:
    trainer = {"hf": hf, "sft": sft, "dpo": dpo, "grpo": grpo}[KIND]()
    if "by_hand" in CHANGES:
        by_hand(trainer)
    if "plain" not in CHANGES:
        trainer.add_callback(RecorderCallback(FOLDER, trainer, gradients="full"))
    trainer.train()
    trained = trainer.model
weights = b"".join(value.detach().numpy().tobytes() for value in trained.state_dict().values())
sys.stdout.write(f"weights {hashlib.sha256(weights).hexdigest()}\n")
