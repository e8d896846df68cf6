"""Losses and gradients of other systems, where their definition is ours: numbers that their own code computed.

`peer_cases.json`, a case a line: source and version, the system's loss and d loss / d log-probability, trained tokens
only (each with its document), and what the sum of tokens is divided by: "token" (their number), "document" (length of
the token's document, times divisor), "raw" (divisor). Float64, computed by each system's own code.
"""

import json
from pathlib import Path

import pytest
import torch

from workbench.losses import LossInputs
from workbench.losses.build import SURROGATES

CASES = json.loads(Path(__file__).with_name("peer_cases.json").read_text())


def name(case):
    return f"{case['source'].split()[0]}-{case['case']}-{case['kind']}"


def row(case, key):
    return torch.tensor(case[key], dtype=torch.float64) if key in case else None


def weights(case, inputs):
    if case["divide"] == "token":
        return 1 / len(case["policy"])
    return 1 / (case["divisor"] * (inputs.document_lengths_T if case["divide"] == "document" else 1.0))


@pytest.mark.parametrize("case", [case for case in CASES if case["kind"] != "dpo"], ids=name)
def test_matches_the_peer(case):
    policy_T = row(case, "policy").requires_grad_()
    sampler_T = row(case, "sampler")
    old_T = row(case, "old") if "old" in case else sampler_T if sampler_T is not None else policy_T.detach()
    inputs = LossInputs(
        policy_T,
        old_T,
        row(case, "advantages"),
        sampler_logprobs_T=sampler_T,
        document_ids_T=torch.tensor(case["documents"]),
    )
    values_T = case.get("coefficient", 1.0) * SURROGATES[case["kind"]](inputs, **case["parameters"]).values_T
    if "squared" in case:
        values_T = values_T + case["squared"] * inputs.log_ratio("sampler") ** 2
    loss = (values_T * weights(case, inputs)).sum()
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], rel=1e-9, abs=1e-9)
    torch.testing.assert_close(policy_T.grad, row(case, "gradient"), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", [case for case in CASES if case["kind"] == "dpo"], ids=name)
def test_dpo_of_rows_that_are_pairs(case):
    """Rows 2i and 2i + 1 are the chosen and the rejected document; the loss is divided by pairs + 1e-8."""
    policy_T = row(case, "policy").requires_grad_()
    documents_T = torch.tensor(case["documents"])
    inputs = LossInputs(
        policy_T,
        policy_T.detach(),
        torch.zeros_like(policy_T, requires_grad=False),
        ref_logprobs_T=row(case, "ref"),
        document_ids_T=documents_T,
        group_ids_T=documents_T // 2,
        rewards_T=1.0 - documents_T % 2,
    )
    values_T = SURROGATES["dpo"](inputs, beta=0.05).values_T
    loss = (values_T / inputs.document_lengths_T).sum() / (2 * 3)
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], rel=1e-8)
    torch.testing.assert_close(policy_T.grad, row(case, "gradient"), rtol=1e-8, atol=1e-9)


def test_there_are_cases_of_every_kind_that_a_peer_shares():
    assert len(CASES) == 19
    assert {case["kind"] for case in CASES} >= {
        "ppo",
        "gspo",
        "luspo",
        "vespo",
        "sapo",
        "cispo",
        "dro",
        "gpg",
        "reinforce",
        "dppo_tv",
        "clip_cov",
        "kl_cov",
        "dpo",
    }
