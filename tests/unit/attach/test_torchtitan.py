"""The recorder of torchtitan's Trainer, with a stand-in for it; torchtitan itself: tests/engines."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from workbench.attach.torchtitan import record
from workbench.errors import SpecError
from workbench.records import trainer_files as files

IDS = torch.ones(2, 3)
LABELS = torch.tensor([[1, 2, -100, 4], [1, -100, -100, -100]])


class Trainer:
    """Its loss is back-propagated in two chunks, and then once more for what lies below them."""

    def __init__(self, pp=1, cp=1):
        torch.manual_seed(0)
        self.model_parts = [nn.ModuleDict({"head": nn.Linear(2, 1), "decoder": nn.Linear(3, 2)})]
        self.optimizers = [torch.optim.SGD(self.model_parts[0].parameters(), lr=0.1)]
        sizes = {"dp_replicate": 1, "dp_shard": 1, "cp": cp, "tp": 1, "pp": pp, "pp_enabled": pp > 1}
        self.parallel_dims = SimpleNamespace(**sizes, get_optional_mesh=lambda name: None)
        training = SimpleNamespace(max_norm=0.5, mixed_precision_param="bfloat16", seq_len=4)
        self.config, self.loss_fn, self.gradient_accumulation_steps = SimpleNamespace(training=training), self, 2

    def forward_backward_step(self, *, input_dict, labels, global_valid_tokens):
        head, decoder = self.model_parts[0].values()
        hidden = decoder(input_dict["input"])
        chunks = [row.detach().requires_grad_() for row in hidden]
        losses = [head(chunk).square().sum() / global_valid_tokens for chunk in chunks]
        for loss in losses:
            loss.backward()
        hidden.backward(torch.stack([chunk.grad for chunk in chunks]))
        total = torch.stack(losses).sum().detach()
        (
            total + 0 * (head.weight.sum() + decoder.weight.sum())
        ).backward()  # as the number that torchtitan back-propagates last
        return total

    def train_step(self):
        for _ in range(2):
            self.forward_backward_step(input_dict={"input": IDS}, labels=LABELS, global_valid_tokens=8)
        nn.utils.clip_grads_with_norm_(self.model_parts[0].parameters(), 0.5, torch.tensor(1.0))
        for optimizer in self.optimizers:
            optimizer.step()


@pytest.mark.parametrize("cp", [1, 2])
def test_a_chunked_loss_counts_once_and_the_context_is_that_of_the_trainer(cp, tmp_path):
    trainer = Trainer(cp=cp)
    head, decoder = trainer.model_parts[0].values()
    loss = 2 * float(head(decoder(IDS)).detach().square().sum()) / 8
    with record(tmp_path / "mine", trainer, gradients="full", context={"seed": 3}):
        trainer.train_step()
    context, [step] = files.read_context(tmp_path / "mine"), files.read_steps(tmp_path / "mine")
    known = {"dp": 1, "cp": cp, "tp": 1, "micro_batches": 2, "max_grad_norm": 0.5, "precision": "bfloat16", "seed": 3}
    assert context.items() >= known.items()
    assert (step["loss"], step["micro_batches"]) == (pytest.approx(loss, rel=1e-6), 2)
    assert step["counts"] == {"trained_tokens": 8 / cp, "all_tokens": 16 / cp}
    assert step["observed"]["clip"] == {"max_norm": 0.5}


def test_a_closed_recorder_leaves_the_trainer_as_it_was(tmp_path):
    trainer = Trainer()
    recorder = record(tmp_path / "mine", trainer)
    assert "forward_backward_step" in vars(trainer)
    recorder.close()
    trainer.train_step()
    assert "forward_backward_step" not in vars(trainer)
    assert not (tmp_path / "mine" / "steps.jsonl").exists()


def test_pipeline_stages_are_refused(tmp_path):
    with pytest.raises(SpecError, match="2 pipeline stages"):
        record(tmp_path / "mine", Trainer(pp=2))
