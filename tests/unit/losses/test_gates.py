"""Gates: each statistic by hand, at each level, on two documents of which one is far from its sampler."""

import math

import pytest
import torch

from workbench.losses.gates import through_gates
from workbench.losses.terms import LossInputs
from workbench.specs.losses import CorrectionSpec

OLD = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64)
MU = torch.tensor([0.01, -0.02, 1.0, -0.9], dtype=torch.float64)
DOCUMENTS = torch.tensor([0, 0, 1, 1])


def passed(mask=(1, 1, 1, 1), **gate):
    inputs = LossInputs(
        OLD,
        OLD,
        torch.ones_like(OLD),
        OLD - MU,
        loss_mask_T=torch.tensor(mask, dtype=torch.bool),
        document_ids_T=DOCUMENTS,
    )
    return through_gates(inputs, CorrectionSpec(**gate), MU).int().tolist()


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        ({"gate": "ratio", "gate_high": 1.5}, [1, 1, 0, 1]),
        ({"gate": "ratio", "gate_low": 0.5}, [1, 1, 1, 0]),
        ({"gate": "ratio", "gate_level": "document_mean", "gate_high": math.exp(0.04)}, [1, 1, 0, 0]),
        ({"gate": "ratio", "gate_level": "document_sum", "gate_high": math.exp(0.11)}, [1, 1, 1, 1]),
        ({"gate": "k1", "gate_high": 0.5}, [1, 1, 1, 0]),
        ({"gate": "k2", "gate_high": 0.45}, [1, 1, 0, 1]),
        ({"gate": "k3", "gate_high": math.exp(-0.9) - 0.1 + 0.01}, [1, 1, 0, 1]),
        ({"gate": "k3", "gate_level": "document_max", "gate_high": 0.1}, [1, 1, 0, 0]),
        ({"gate": "ratio", "gate_level": "document_min", "gate_low": 0.9}, [1, 1, 0, 0]),
        ({"gate": "total_variation", "gate_high": 0.1}, [1, 1, 0, 1]),
        ({"gate": "k1", "gate_high": 0.5, "further_gates": [{"statistic": "k2", "high": 0.45}]}, [1, 1, 0, 0]),
        ({"gate": "k2", "gate_high": 0.1, "log_clamp": 0.3}, [1, 1, 1, 1]),
    ],
    ids=str,
)
def test_gates_by_hand(gate, expected):
    assert passed(**gate) == expected


def test_tokens_that_do_not_count_decide_nothing():
    assert passed(mask=(1, 1, 0, 1), gate="k1", gate_level="document_max", gate_high=0.5)[:2] == [1, 1]
    assert passed(mask=(1, 1, 1, 0), gate="k1", gate_level="document_max", gate_high=0.5) == [1, 1, 1, 1]
