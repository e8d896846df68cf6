"""Every number about a step is the oracle's in any layout: documents that straddle ranks, a sharded vocabulary."""

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.oracles import metrics as oracle
from tests.oracles.step import document_logprobs, exact
from tests.parity.cases import many_steps
from tests.parity.sequence_cases import Oracle
from workbench.policy.decoder import tiny_qwen3

PPO = {
    "name": "ppo",
    "surrogate": {"clip_low": 0.1, "clip_high": 0.15},
    "correction": {"kind": "tis", "ratio_high": 1.02},
}
GSPO = {"name": "gspo", "surrogate": {"clip_low": 0.05, "clip_high": 0.08}}
LAYOUTS = {
    "cp2_zigzag": {"cp": 2, "order": "zigzag"},
    "tp2": {"tp": 2},
    "dp2_cp2": {"dp": 2, "cp": 2, "order": "contiguous"},
    "cp2_tp2": {"cp": 2, "tp": 2, "order": "zigzag"},
}


def spec(loss, layout=None, **more):
    return {
        "model": {"source": "tiny-qwen3", "tied": True, "seed": 3},
        "precision": "float64",
        "loss": loss,
        "layout": layout or {},
        "record": {"metrics": "full"},
    } | more


@pytest.fixture(scope="module")
def documents():
    return Oracle(7).documents


@pytest.fixture(scope="module")
def truth(documents):
    """Documents for the oracle of metrics, log-probabilities and entropies from the stock model."""
    model = exact(tiny_qwen3(19, tied=True, seed=3))
    rows = []
    for document, logprobs in zip(documents, document_logprobs(model, documents), strict=True):
        logits = model(input_ids=torch.tensor([document["tokens"]]), use_cache=False).logits[0].detach()
        entropies = [0.0] + [-sum(float(p) * float(p.log()) for p in torch.softmax(line, 0)) for line in logits[:-1]]
        rows.append(
            {
                "mask": document["loss_mask"],
                "advantage": document["advantages"],
                "entropy": entropies,
                "policy": [0.0 if v is None else v.item() for v in logprobs],
                "old": document["old_logprobs"],
                "sampler": document["sampler_logprobs"],
                "ref": document["ref_logprobs"],
            }
        )
    return rows


def test_one_rank_reports_the_oracles_numbers(documents, truth):
    result = many_steps([(spec(PPO), documents)])[0]["metrics"]
    expected = oracle.canonical(truth, lower=0.9, upper=1.15)
    assert expected.keys() <= result.keys()
    for key, value in expected.items():
        assert result[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key
    raw = [oracle.ratio("old", "sampler")(token) for _, token in oracle.counted(truth)]
    assert result["weight/raw/max"] == pytest.approx(max(raw))
    assert result["weight/applied/mean"] == pytest.approx(sum(min(w, 1.02) for w in raw) / len(raw))
    assert result["weight/truncated/fraction"] == pytest.approx(sum(w > 1.02 for w in raw) / len(raw))
    assert 0 < result["weight/truncated/fraction"] < 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_reports_the_numbers_of_one_rank(name, documents, tmp_path):
    layout = LAYOUTS[name]
    world = layout.get("dp", 1) * layout.get("cp", 1) * layout.get("tp", 1)
    losses = (PPO, GSPO)
    expected = many_steps([(spec(loss), documents) for loss in losses])
    cases = [(spec(loss, layout, data={"micro_batches": 2}), documents) for loss in losses]
    for rank, answers in enumerate(run_ranks(many_steps, world, tmp_path, cases)):
        for actual, wanted in zip(answers, expected, strict=True):
            assert actual["metrics"] == pytest.approx(wanted["metrics"], rel=1e-9, abs=1e-11), f"{name}, rank {rank}"


def test_a_ratio_of_documents_is_whole_where_documents_straddle_ranks(documents, truth, tmp_path):
    ratios = oracle.document_ratios(truth)
    answers = run_ranks(many_steps, 2, tmp_path, [(spec(GSPO, LAYOUTS["cp2_zigzag"]), documents)])
    for answer in answers:
        result = answer[0]["metrics"]
        assert result["ratio_document/policy_old/max"] == pytest.approx(max(ratios), rel=1e-10)
        assert result["ratio_document/policy_old/mean"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-10)
        assert result["segments/trained/sum"] == oracle.segments(truth) > result["documents/trained/sum"] == len(ratios)
        assert 0 < result["clip/region/fraction"] < 1
