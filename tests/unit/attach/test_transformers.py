"""The callback of transformers' trainers, called as they call it; the trainers themselves: tests/engines."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from workbench.attach.transformers import RecorderCallback
from workbench.records import trainer_files as files

ARGS = SimpleNamespace(
    world_size=1, gradient_accumulation_steps=2, max_grad_norm=0.5, beta=0.1, loss_type=["dapo"], temperature=None
)


def trained(callback, compute=None, steps=2):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callback.on_train_begin(ARGS, None, None, model=model, optimizer=optimizer)
    for _ in range(steps):
        for _ in range(2):
            loss = model(torch.ones(2, 3)).square().mean() / 2
            loss = loss if compute is None else compute(loss)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        callback.on_step_end(ARGS, None, None)
    callback.on_train_end(ARGS, None, None)
    optimizer.step()  # after the end nothing is recorded


def test_losses_settings_and_gradients_before_the_clip_are_recorded(tmp_path):
    trained(RecorderCallback(tmp_path / "mine", gradients="full", context={"order": "given"}))
    context, steps = files.read_context(tmp_path / "mine"), files.read_steps(tmp_path / "mine")
    expected = {
        "dp": 1,
        "micro_batches": 2,
        "max_grad_norm": 0.5,
        "beta": 0.1,
        "loss_type": "['dapo']",
        "order": "given",
    }
    assert {name: context[name] for name in expected} == expected
    assert "temperature" not in context
    assert [step["step"] for step in steps] == [0, 1]
    assert all(step["loss"] > 0 and step["observed"]["clip"] == {"max_norm": 0.5} for step in steps)
    assert steps[0]["loss"] > steps[1]["loss"]


class Grpo:
    """The methods of TRL's trainer that the callback reads."""

    max_completion_length = 4
    accelerator = SimpleNamespace(num_processes=2, process_index=1, scaler=None)

    def _get_per_token_logps_and_entropies(self, model, ids):
        return -ids.float() * model, ids.float() / 10, None

    def _compute_loss(self, model, inputs):
        return self._get_per_token_logps_and_entropies(model, inputs["completion_ids"])[0].mean()


def test_values_of_tokens_are_noted_with_places_that_do_not_depend_on_padding(tmp_path):
    trainer = Grpo()
    callback = RecorderCallback(tmp_path / "mine", trainer)
    inputs = {
        "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
        "completion_ids": torch.tensor([[5, 6, 7], [8, 9, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "advantages": torch.tensor([0.5, -0.5]),
        "ref_per_token_logps": torch.full((2, 3), -2.0),
    }

    def compute(loss):
        with torch.no_grad():
            trainer._compute_loss(1.0, inputs)  # an evaluation is no part of the step
        return loss + 0.0 * trainer._compute_loss(torch.tensor(1.0, requires_grad=True), inputs)

    trained(callback, compute, steps=1)
    assert not vars(trainer), "the trainer is left as it was"
    [step] = files.read_steps(tmp_path / "mine")
    tokens = files.read_tensors(tmp_path / "mine", 0, "tokens")
    assert step["counts"] == {"documents": 4.0, "trained_tokens": 10.0}
    here = tokens["documents"] >= 0
    assert here.nonzero().flatten().tolist() == [4, 5, 6, 12, 13, 20, 21, 22, 28, 29]  # document * 4 + place
    assert tokens["documents"][here].tolist() == [1, 1, 1, 3, 3, 5, 5, 5, 7, 7]
    assert tokens["targets"][here].tolist() == [5, 6, 7, 8, 9] * 2
    assert tokens["positions"][here].tolist() == [1, 2, 3, 2, 3] * 2
    assert tokens["advantages"][here].tolist() == [0.5, 0.5, 0.5, -0.5, -0.5] * 2
    assert torch.equal(tokens["old_logprobs"], tokens["policy_logprobs"])
    assert tokens["ref_logprobs"][here].tolist() == [-2.0] * 10
    assert tokens["entropy_nats"][here].tolist() == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9] * 2)
