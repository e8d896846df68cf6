"""The recorder of verl's worker, with stand-ins for the worker and the package; verl itself: tests/engines."""

import importlib
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from workbench.records import trainer_files as files

NAME = "workbench.attach.verl"
PACKAGES = ("verl", "verl.workers", "verl.workers.utils", "verl.workers.utils.padding")
PROMPTS, RESPONSES = [[7], [8, 9], [7, 7], [6]], [[1, 2, 3], [4], [5, 1], [2, 3]]


def module(monkeypatch, padding):
    for name in (NAME, *PACKAGES):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in PACKAGES[:-1]:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, PACKAGES[-1], padding)
    attach = importlib.import_module(NAME)
    monkeypatch.delitem(sys.modules, NAME)
    return attach


class Batch(dict):
    """A batch of rows, as a TensorDict: its length is the number of rows."""

    def __len__(self):
        return len(self["weights"])

    def part(self, rows):
        def of(values):
            if not values.is_nested:
                return values[rows]
            return nested([row.tolist() for row in values.unbind()[rows]])

        return Batch({name: of(values) for name, values in self.items()})


def nested(rows):
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def padded(rows, width, value=0):
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def batch(form):
    advantages = [[float(row)] * len(one) for row, one in enumerate(RESPONSES)]
    trained = [[0, 1, 1], [1], [1, 1], [0, 0]]
    if form == "nested":
        fields = {"prompts": nested(PROMPTS), "responses": nested(RESPONSES), "response_mask": nested(trained)}
        fields |= {"advantages": nested(advantages), "old_log_probs": nested(advantages)}
    else:
        fields = {"prompts": padded(PROMPTS, 2), "responses": padded(RESPONSES, 3)}
        fields |= {"response_mask": padded(trained, 3), "advantages": padded(advantages, 3, 0.0)}
        fields["old_log_probs"] = fields["advantages"]
        lengths = ((PROMPTS, 2), (RESPONSES, 3))
        fields["attention_mask"] = torch.cat([padded([[1] * len(r) for r in rows], w) for rows, w in lengths], 1)
    return Batch(fields | {"weights": torch.ones(4)})


class Worker:
    def __init__(self, each):
        torch.manual_seed(0)
        self.module, self.each = nn.Linear(1, 1), each
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.engine_config = SimpleNamespace(use_dynamic_bsz=False, micro_batch_size_per_gpu=each)
        self.optimizer_config, self.engine = SimpleNamespace(clip_grad=0.5), self
        self.loss_fn = partial(self.loss, config=SimpleNamespace(clip_ratio=0.1, loss_agg_mode="token-mean"))

    def get_data_parallel_group(self):
        return None

    def get_data_parallel_size(self):
        return 1

    def loss(self, config, model_output, data, dp_group=None):
        return self.module(data["weights"][:, None]).sum(), {}

    def train_batch(self, data, loss_function):
        for start in range(0, len(data), self.each):
            part = data.part(slice(start, start + self.each))
            output = {"log_probs": -1.0 - part["workbench_row"][:, None].expand(-1, 3), "entropy": None}
            loss, _ = loss_function(model_output=output, data=part, dp_group=None)
            loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 0.5)
        self.optimizer.step()


def narrowed(values, data):
    """As verl's function: as wide as the longest response of a micro-batch, or as padded responses are."""
    responses = data["responses"]
    return values[:, : int(responses.offsets().diff().max()) if responses.is_nested else responses.shape[1]]


@pytest.mark.parametrize("form", ["nested", "padded"])
@pytest.mark.parametrize("each", [1, 2, 4])
def test_values_of_tokens_lie_in_one_order_whatever_the_micro_batches(form, each, monkeypatch, tmp_path):
    padding = ModuleType(PACKAGES[-1])
    padding.no_padding_2_padding = narrowed
    worker = Worker(each)
    recorder = module(monkeypatch, padding).record(tmp_path / "mine", worker)
    worker.train_batch(batch(form), worker.loss_fn)
    recorder.close()
    assert "train_batch" not in vars(worker)
    context, [step] = files.read_context(tmp_path / "mine"), files.read_steps(tmp_path / "mine")
    known = {"dp": 1, "micro_batch_size": each, "max_grad_norm": 0.5, "clip_ratio": 0.1, "loss_agg_mode": "token-mean"}
    assert context.items() >= known.items()
    assert step["counts"] == {"documents": 3.0, "masked_documents": 1.0, "trained_tokens": 5.0}
    tokens = files.read_tensors(tmp_path / "mine", 0, "tokens")
    here = tokens["documents"] >= 0
    assert tokens["documents"][here].tolist() == [0, 0, 0, 1, 2, 2, 3, 3]
    assert tokens["targets"][here].tolist() == [1, 2, 3, 4, 5, 1, 2, 3]
    assert tokens["positions"][here].tolist() == [1, 2, 3, 2, 2, 3, 1, 2]
    assert tokens["trained"][here].tolist() == [False, True, True, True, True, True, False, False]
    assert tokens["advantages"][here].tolist() == tokens["documents"][here].tolist()
    assert tokens["policy_logprobs"][here].tolist() == (-1 - tokens["documents"][here]).tolist()
    assert len(here) == 3 * 3 + 2, "a document takes as many places as the longest response of all"


def test_without_the_package_its_name_is_in_the_error(monkeypatch):
    with pytest.raises(ImportError, match="verl"):
        module(monkeypatch, None)
