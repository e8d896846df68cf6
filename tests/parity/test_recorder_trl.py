"""TRL's GRPOTrainer, recorded: its two steps are ours on the same batches, and `diagnose` reports no difference.

Letters: B completions of a micro-batch | C places of a padded completion | P of a padded prompt.
"""

import warnings
from dataclasses import replace

import pytest
import torch

import workbench as wb
from workbench.policy.decoder import tiny_qwen3
from workbench.records.directory import RunDirectory
from workbench.rollouts import files
from workbench.specs.run import RunSpec
from workbench.systems.translate import loss_spec
from workbench.train.worker import run_here

MICRO_BATCHES, EACH, LENGTH = 3, 2, 9
SYMBOLS = ["<pad>", "<eos>", *"0123456789+=?"]
OPTIONS = {"loss_type": "dapo", "beta": 0.0}
RATE = 0.02


def make_tokenizer():
    """Each character a token; made here, because nothing may be fetched."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def odd_digits(completions, **_):
    """A reward that differs between completions."""
    return [float(sum(symbol in "13579" for symbol in completion)) for completion in completions]


def train(model, folder):
    """Two steps of TRL, recorded; and the micro-batches as its loss saw them."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    seen, text = [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    recorder = wb.Recorder(
        folder / "record",
        model,
        optimizer,
        gradients="full",
        context={"dp": 1, "micro_batches": MICRO_BATCHES, "temperature": 1.0, "trainer": "trl"},
    )

    class Recorded(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *arguments, **named):
            text.append(super()._get_per_token_logps_and_entropies(*arguments, **named))
            return text[-1]

        def compute_loss(self, model, inputs, *arguments, **named):
            loss = super().compute_loss(model, inputs, *arguments, **named)
            logprobs_BC, entropies_BC, _ = text[-1]
            trained_BC, prompts_BP = inputs["completion_mask"].bool(), inputs["prompt_mask"].bool()
            # where each completion's tokens lie in all documents of all steps, prompts included
            lengths_B = prompts_BP.sum(1) + trained_BC.sum(1)
            before = sum(int(batch["prompt_mask"].sum() + batch["completion_mask"].sum()) for batch in seen)
            begins_B = before + lengths_B.cumsum(0) - trained_BC.sum(1)
            source_BC = (begins_B[:, None] + torch.arange(trained_BC.shape[1])).where(trained_BC, -1)
            recorder.note(
                loss,
                counts={
                    "documents": len(trained_BC),
                    "trained_tokens": int(trained_BC.sum()),
                    "all_tokens": int(lengths_B.sum()),
                    "padded_tokens": trained_BC.numel() + prompts_BP.numel(),
                },
                tokens={
                    "policy_logprobs": logprobs_BC,
                    "entropy_nats": entropies_BC,
                    "trained": trained_BC,
                    "source": source_BC,
                },
            )
            seen.append(
                {
                    name: inputs[name]
                    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
                }
                | {"old_per_token_logps": logprobs_BC.detach()}
            )
            return loss

        def _clip_grad_norm(self, model):
            recorder.take_gradients()
            return super()._clip_grad_norm(model)

    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=2,
        per_device_train_batch_size=EACH,
        learning_rate=RATE,
        gradient_accumulation_steps=MICRO_BATCHES,
        num_generations=3,
        max_completion_length=LENGTH,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        temperature=1.0,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        logging_steps=1,
        seed=3,
        **OPTIONS,
    )
    prompts = Dataset.from_list([{"prompt": f"{number}+{2 * number}="} for number in (3, 4, 12, 41)])
    trainer = Recorded(
        model=model,
        reward_funcs=odd_digits,
        args=arguments,
        train_dataset=prompts,
        processing_class=make_tokenizer(),
        optimizers=(optimizer, None),
    )
    trainer.train()
    return seen, [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]


def unpadded(prompt_ids, prompt_mask, completion_ids, completion_mask, advantages, old_per_token_logps):
    """The documents of a micro-batch; a prompt is padded on its left, a completion on its right."""
    for number, advantage in enumerate(advantages.tolist()):
        prompt = prompt_ids[number][prompt_mask[number].bool()].tolist()
        trained = completion_mask[number].bool()
        completion, logprobs = completion_ids[number][trained].tolist(), old_per_token_logps[number][trained].tolist()
        nothing = [0.0] * len(prompt)
        yield {
            "tokens": prompt + completion,
            "loss_mask": [False] * len(prompt) + [True] * len(completion),
            "advantages": nothing + [advantage] * len(completion),
            "old_logprobs": nothing + logprobs,
        }


def ours(seen, weights, folder, options=OPTIONS):
    """The same batches, saved as a rollout dataset and trained on here from the same weights."""
    documents = [document for batch in seen for document in unpadded(**batch)]
    files.save(wb.RolloutBatch.from_documents(documents, temperature=1.0), folder / "rollouts", provenance={})
    spec = RunSpec.model_validate(
        {
            "steps": 2,
            "model": {"source": str(weights)},
            "data": {"path": str(folder / "rollouts"), "documents_per_step": MICRO_BATCHES * EACH},
            "loss": loss_spec("trl", options),
            "record": {"tokens": True, "gradients": "full"},
            "optimizer": {"name": "sgd", "learning_rate": RATE, "weight_decay": 0.0, "max_grad_norm": 1.0},
        }
    )
    run = RunDirectory.create(folder / "runs", "ours", spec)
    run_here(run, folder)
    return run


def cut_to(record, other):
    """A record of which each step has only the other's tokens: ours counts later steps' documents too."""
    steps = []
    for step, theirs in zip(record.steps, other.steps, strict=True):
        length = len(theirs.tokens["trained"])
        steps.append(replace(step, tokens={name: values[:length] for name, values in step.tokens.items()}))
    return replace(record, steps=tuple(steps))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """TRL's record, the batches it saw, its own gradient norms, and where the weights lie that it began with."""
    folder = tmp_path_factory.mktemp("trl")
    model = tiny_qwen3(len(SYMBOLS), seed=3)
    model.save_pretrained(folder / "policy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TRL calls settings of transformers by their old names
        seen, norms = train(model, folder)
    return wb.Record.load(folder / "record"), seen, norms, folder / "policy"


def test_gradients_are_taken_before_trl_clips_them(recorded):
    record, _, norms, _ = recorded
    assert len(record.steps) == len(norms) == 2
    for step, norm in zip(record.steps, norms, strict=True):
        assert norm > 1.0, "the step must be clipped"
        assert sum(value**2 for value in step.gradient_norms.values()) ** 0.5 == pytest.approx(norm, rel=1e-5)
        assert step.counts["documents"] == MICRO_BATCHES * EACH
        assert step.counts["trained_tokens"] == int(step.tokens["trained"].sum())


def test_our_steps_on_the_same_batches_are_the_same(recorded, tmp_path):
    theirs, seen, _, weights = recorded
    mine = cut_to(wb.Record.of(ours(seen, weights, tmp_path)), theirs)
    for one, two in zip(mine.steps, theirs.steps, strict=True):
        assert two.loss == pytest.approx(one.loss, rel=1e-4, abs=1e-5)
        assert set(two.gradient_norms) == set(one.gradient_norms)
        trained = one.tokens["trained"]
        assert torch.equal(trained, two.tokens["trained"])
        for name in ("policy_logprobs", "entropy_nats"):
            torch.testing.assert_close(two.tokens[name][trained], one.tokens[name][trained], rtol=1e-4, atol=1e-4)
        for name, gradient in one.gradients.items():
            assert (two.gradients[name] - gradient).norm() < 1e-4 * gradient.norm(), name
    diagnosis = wb.diagnose(mine, theirs)
    assert diagnosis.equal, str(diagnosis)


def test_a_loss_that_divides_by_something_else_is_not_the_same(recorded, tmp_path):
    theirs, seen, _, weights = recorded
    mine = cut_to(wb.Record.of(ours(seen, weights, tmp_path, OPTIONS | {"loss_type": "grpo"})), theirs)
    diagnosis = wb.diagnose(mine, theirs)
    assert not diagnosis.equal
    assert "cannot be told from these records; note old_logprobs, advantages, targets" in diagnosis.headline
