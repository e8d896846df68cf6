"""Write the dumps in this folder with TRL's own trainer: tensors of `_compute_loss`, and the completions of its log.

    pip install trl==1.16.0 transformers==5.23.0 accelerate==1.15.0; pip install torch==2.13.0
    python tests/dumps/trl/write.py tests/dumps/trl

A tiny decoder, two prompts with four completions, two optimizer steps on one generation batch: in the second the policy
has moved. The hook is what a user adds.

`with_gradients.pt` has the gradients of the parameters, too, and `policy/` the checkpoint that they are of.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(30))]


class Dumping(trl.GRPOTrainer):
    """`GRPOTrainer` that saves what `_compute_loss` was given and what came out."""

    def _get_per_token_logps_and_entropies(self, *arguments, **options):
        outputs = super()._get_per_token_logps_and_entropies(*arguments, **options)
        if outputs[0].requires_grad:
            outputs[0].retain_grad()
            self.outputs = outputs
        return outputs

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        self.seen = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        self.seen["loss"] = loss.detach()
        return loss

    def training_step(self, *arguments, **options):
        self.model.save_pretrained(f"{self.args.output_dir}/policy{self.state.global_step}")
        result = super().training_step(*arguments, **options)
        logps, entropies, _ = self.outputs
        more = {"per_token_logps": logps.detach(), "grad_per_token_logps": logps.grad, "entropies": entropies.detach()}
        metrics = {name: values[-1] for name, values in self._metrics["train"].items()}
        folder, step = self.args.output_dir, self.state.global_step
        torch.save({**self.seen, **more, "metrics": metrics}, f"{folder}/step{step}.pt")
        gradients = {name: value.grad.clone() for name, value in self.model.named_parameters()}
        torch.save({**self.seen, **more, "metrics": metrics, "gradients": gradients}, f"{folder}/gradients{step}.pt")
        return result


def share_of_even(completion_ids, **_):
    """Return the share of even tokens of each completion."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def train(folder: str, loss_type: str) -> None:
    """Train two steps on one generation batch."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=32, num_key_value_heads=1, pad_token_id=0, eos_token_id=1, bos_token_id=None, **sizes
    )
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    args = trl.GRPOConfig(
        output_dir=folder,
        loss_type=loss_type,
        num_generations=4,
        num_iterations=2,
        max_completion_length=8,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        max_steps=2,
        learning_rate=0.02,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        log_completions=True,
        disable_tqdm=True,
        seed=3,
    )
    Dumping(
        model=Qwen2ForCausalLM(config),
        reward_funcs=share_of_even,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "w3 w5 w7"}, {"prompt": "w4 w8 w9 w2"}]),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
    ).train()


def main(folder: Path) -> None:
    """Write the second step of two loss types, and the completions; of one also its gradient and its checkpoint."""
    for loss_type in ("dapo", "grpo"):
        with tempfile.TemporaryDirectory() as scratch:
            train(scratch, loss_type)
            if loss_type == "grpo":
                shutil.copy(f"{scratch}/gradients1.pt", folder / "with_gradients.pt")
                shutil.rmtree(folder / "policy", ignore_errors=True)
                shutil.copytree(f"{scratch}/policy1", folder / "policy")
            shutil.copy(f"{scratch}/step1.pt", folder / f"{loss_type}.pt")
            shutil.copy(f"{scratch}/completions/completions_00001.parquet", folder / "completions.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
