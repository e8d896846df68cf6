import functools
import json
import math
from pathlib import Path

import pytest
import torch

from tests.helpers.metric_rows import inputs_of, nasty_documents
from tests.oracles import metrics as oracle
from workbench.errors import SpecError
from workbench.losses.terms import LossInputs, Term
from workbench.metrics.policy import Quantities, policy_metrics
from workbench.metrics.quantities import Advantage, ClipRule, DocumentSlots, LogRatio, Ratio
from workbench.metrics.values import finish_metrics
from workbench.sharding.mesh import Axis
from workbench.specs.losses import LossSpec
from workbench.systems import metrics
from workbench.systems.metrics import PeerSettings, alias_table, aliases, as_named_by, left_out, settings_of
from workbench.systems.registry import SYSTEMS

ALONE = Axis("dp_cp")
PEERS = json.loads((Path(__file__).parent / "peer_cases.json").read_text())["cases"]
HERE = ("fast_llm", "trl", "verl", "nemo_rl")
"""Systems whose names are held to an oracle in this file; the others have files of their own in `aliases`."""
PPO = LossSpec(surrogate={"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0})
GSPO = LossSpec(name="gspo", surrogate={"clip_low": 0.05, "clip_high": 0.06})


def named(system, documents, spec, terms=None):
    inputs, mask = inputs_of(documents)
    values = as_named_by(system, inputs, mask, terms=terms, loss_spec=spec, slots=DocumentSlots(0, len(documents)))
    return finish_metrics([values], ALONE)


# ---- against the oracle ----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [PPO, GSPO], ids=["tokens", "documents"])
@pytest.mark.parametrize("system", HERE)
@pytest.mark.parametrize("seed", range(4))
def test_names_are_computed_by_their_definitions(system, spec, seed):
    documents = nasty_documents(seed, infinite=False)
    surrogate = spec.surrogate
    bounds = {"lower": 1 - surrogate.clip_low, "upper": 1 + surrogate.clip_high}
    sequence = spec is GSPO
    if system == "verl":
        expected = oracle.verl(documents, **bounds, dual=surrogate.dual_clip, sequence=sequence)
    else:
        expected = getattr(oracle, system)(documents, **bounds, sequence=sequence, num_documents=len(documents))
    metrics = named(system, documents, spec)
    # TRL reports CISPO's clip for CISPO only; NeMo counts rows.
    special = {"cispo_clip_ratio", "num_valid_samples", "global_valid_seqs"}
    assert expected.keys() - special <= metrics.keys()
    for key in expected.keys() - special:
        assert metrics[key] == pytest.approx(expected[key], rel=1e-9, abs=1e-12), key


# ---- against numbers of the systems themselves -------------------------------------------------------------


def spec_of(case):
    """The loss that a case was made with."""
    config, system = case["config"], case["system"]
    if system == "fast_llm":
        kind = "gspo" if "num_segments" in config else "ppo"
        return LossSpec(
            surrogate={"kind": kind, "clip_low": config["epsilon_low"], "clip_high": config["epsilon_high"]}
        )
    if system == "nemo_rl":
        kind = "gspo" if config.get("sequence_level_importance_ratios") else "ppo"
        return LossSpec(
            surrogate={
                "kind": kind,
                "clip_low": config.get("ratio_clip_min", 0.2),
                "clip_high": config.get("ratio_clip_max", 0.2),
            },
            kl={"estimator": config.get("reference_policy_kl_type", "k3")},
        )
    if system == "trl":
        if config["loss_type"] == "cispo":
            return LossSpec(surrogate={"kind": "cispo", "bounds": "absolute", "clip_high": config["epsilon_high"]})
        kind = "gspo" if config["importance_sampling_level"] == "sequence" else "ppo"
        return LossSpec(
            surrogate={"kind": kind, "clip_low": config["epsilon_low"], "clip_high": config["epsilon_high"]}
        )
    kind = next((k for k in ("gspo", "cispo") if k in case["id"]), "ppo")
    dual = {"dual_clip": config["clip_ratio_c"]} if kind == "ppo" and "clip_ratio_c" in config else {}
    weights = {"token": "token", "sequence": "document_sum", None: "none"}[config.get("rollout_is")]
    bound = {"ratio": weights, "ratio_high": config["rollout_is_threshold"]} if weights != "none" else {}
    return LossSpec(
        surrogate={
            "kind": kind,
            "clip_low": config.get("clip_ratio_low", 0.2),
            "clip_high": config.get("clip_ratio_high", 0.2),
            **dual,
        },
        correction=bound,
    )


def documents_of(case):
    """Its rows; missing arrays of a case are filled with zeros, which no compared number reads."""
    documents = []
    for row in case["rows"]:
        length = len(row.get("policy", row["old"]))
        documents.append(
            {
                "mask": [1] * length,
                "policy": row.get("policy", row["old"]),
                "advantage": row.get("advantage", [0.0] * length),
                "entropy": row.get("entropy", [0.0] * length),
            }
            | row
        )
    return documents


def unlike(case):
    """Names whose number in a case has a known other reason; each is in LEFT_OUT or in the case's own notes."""
    names = {"loss", "kl_penalty", "positive_nll_loss", "num_valid_samples"}
    if case["system"] == "nemo_rl" and spec_of(case).surrogate.kind == "gspo":
        names |= {"sampling_importance_ratio"}
    return names


def bar(case, key):
    """Relative and absolute. NeMo adds 1e-8 to the length of rows; exp of a row's mean makes a few of it."""
    return {"rel": 5e-8, "abs": 2e-9} if case["system"] == "nemo_rl" else {"rel": 1e-9, "abs": 1e-12}


@pytest.mark.parametrize("case", PEERS, ids=[f"{c['system']}-{c['id']}" for c in PEERS])
def test_names_have_the_numbers_of_the_systems_themselves(case):
    terms, config = {}, case["config"]
    documents, spec = documents_of(case), spec_of(case)
    if config.get("rollout_is"):
        terms["policy"] = truncated(documents, config)
    metrics = named(case["system"], documents, spec, terms)
    compared = (metrics.keys() & case["metrics"].keys()) - unlike(case)
    for key in sorted(compared):
        expected = case["metrics"][key]
        assert metrics[key] == pytest.approx(expected, **bar(case, key)), key
    least = {"fast_llm": 12, "nemo_rl": 11, "trl": 3 if "cispo" in case["id"] else 6, "verl": 2}[case["system"]]
    assert len(compared) >= (27 if config.get("rollout_is") else least)


def truncated(documents, config):
    """The policy term of a truncated sampler correction, as verl makes it."""
    raw = []
    for d in documents:
        gaps = [o - s for o, s in zip(d["old"], d["sampler"], strict=True)]
        raw += [math.exp(sum(gaps))] * len(gaps) if config["rollout_is"] == "sequence" else [math.exp(g) for g in gaps]
    raw_T = torch.tensor(raw, dtype=torch.float64)
    applied_T = raw_T.clamp(max=float(config["rollout_is_threshold"]))
    return Term(
        raw_T,
        extras={
            "raw_weight": raw_T,
            "applied_weight": applied_T,
            "bounded_weight": applied_T,
            "kept": torch.ones_like(raw_T),
        },
    )


# ---- claims of the table ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [PPO, GSPO, LossSpec(name="cispo")], ids=["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("system", HERE)
def test_a_canonical_key_is_the_same_number_and_no_other(system, spec):
    documents = nasty_documents(11, infinite=False)
    inputs, mask = inputs_of(documents)
    slots = DocumentSlots(0, len(documents))
    weights = torch.linspace(0.5, 3, len(mask), dtype=torch.float64)
    terms = {
        "policy": Term(
            weights, extras={"raw_weight": weights, "applied_weight": weights.clamp(max=2.0), "kept": weights < 2.8}
        )
    }
    ours = finish_metrics([policy_metrics(inputs, terms, mask, "full", spec, slots)], ALONE)
    theirs = finish_metrics([as_named_by(system, inputs, mask, terms=terms, loss_spec=spec, slots=slots)], ALONE)
    claimed = 0
    for alias in aliases(system, settings_of(spec, slots)):
        if alias.metric.key in theirs and alias.canonical is not None:
            claimed += 1
            assert theirs[alias.metric.key] == pytest.approx(ours[alias.canonical], rel=1e-12), alias.metric.key
    assert claimed >= (0 if system == "verl" else 2)  # 1e-8 keeps every number of verl from being one of ours


def test_a_sum_of_document_means_over_all_documents_has_no_canonical_name():
    documents = nasty_documents(2, infinite=False)
    assert not all(any(d["mask"]) for d in documents), "the batch must have a document in which nothing counts"
    with_empty = {a.metric.key: a.canonical for a in aliases("fast_llm", settings_of(PPO, DocumentSlots(0, 7)))}
    without = {a.metric.key: a.canonical for a in aliases("fast_llm", settings_of(PPO))}
    assert with_empty["ratio_new_old"] is None
    assert without["ratio_new_old"] == "ratio/policy_old/document_mean"


def test_weights_of_nemo_and_trl_are_those_after_truncation():
    raw, applied = (torch.tensor(v, dtype=torch.float64) for v in ([0.5, 4.0, 9.0], [0.5, 2.0, 0.0]))
    zeros = torch.zeros(3, dtype=torch.float64)
    term = Term(zeros, extras={"raw_weight": raw, "applied_weight": applied, "kept": applied > 0})
    inputs = LossInputs(zeros, zeros, zeros, sampler_logprobs_T=zeros)
    everywhere = torch.ones(3, dtype=torch.bool)
    nemo, trl = (
        finish_metrics([as_named_by(system, inputs, everywhere, terms={"policy": term})], ALONE)
        for system in ("nemo_rl", "trl")
    )
    assert nemo["sampling_importance_ratio"] == pytest.approx(2.5 / 3)
    assert nemo["is_oob_ratio"] == pytest.approx(2 / 3)
    assert trl["sampling/importance_sampling_ratio/mean"] == pytest.approx(2.5 / 3)
    assert trl["sampling/importance_sampling_ratio/max"] == 2.0
    bare = finish_metrics([as_named_by("nemo_rl", inputs, everywhere)], ALONE)
    assert bare["sampling_importance_ratio"] == pytest.approx(1.0)
    assert "is_oob_ratio" not in bare


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_table_has_every_definition(system):
    for settings in (
        PeerSettings(ClipRule(0.8, 1.2, 3.0)),
        PeerSettings(None),
        PeerSettings(ClipRule(0.8, 1.2, None, True), "gspo", 4, "k2", True),
    ):
        table = alias_table(system, settings)
        assert table.index.is_unique
        assert (table[["meaning", "unit", "population", "weight", "reducer"]] != "").all().all()
    assert {name for name, _ in left_out()} <= set(SYSTEMS)


def test_unnameable_metrics_are_refused():
    zeros = torch.zeros(2, dtype=torch.float64)
    inputs, everywhere = LossInputs(zeros, zeros, zeros), torch.ones(2, dtype=torch.bool)
    with pytest.raises(SpecError, match="one of nemo_rl, "):
        as_named_by("megatron", inputs, everywhere)
    with pytest.raises(SpecError, match="a ratio of documents needs the names"):
        as_named_by("verl", inputs, everywhere, loss_spec=GSPO)


def test_settings_are_those_of_the_loss_and_the_step():
    spec = LossSpec(name="gspo", kl={"coefficient": 0.1, "estimator": "k2"})
    result = settings_of(spec, DocumentSlots(0, 5))
    assert (result.kind, result.num_documents, result.kl_estimator, result.of_documents) == ("gspo", 5, "k2", True)
    assert result.clip.upper == 1 + spec.surrogate.clip_high
    assert result.spec is spec


def test_without_a_loss_there_is_no_clip():
    assert settings_of(None) == PeerSettings(None)
    assert settings_of(None, DocumentSlots(0, 3)).num_documents == 3


def test_a_ratio_of_tokens_is_not_one_of_documents():
    assert not settings_of(LossSpec(name="ppo")).of_documents


TOKENS = torch.tensor([2.0, 4.0]).double()
LOGS = torch.tensor([0.6, -2.0]).double()
ADVANTAGES = torch.tensor([1.0, -4.0]).double()
RATIOS = [math.exp(0.3), math.exp(-0.5)]
CLIP = ClipRule(0.8, 1.2, None)


def test_functions_of_a_document():
    assert metrics.ratio_of(TOKENS, LOGS).tolist() == pytest.approx(RATIOS)
    assert metrics.ratio_of(TOKENS, LOGS, epsilon=1.0).tolist() == pytest.approx([math.exp(0.2), math.exp(-0.4)])
    assert metrics.clamped_of(CLIP, TOKENS, LOGS).tolist() == pytest.approx([1.2, 0.8])
    assert metrics.k3_of(TOKENS, LOGS).tolist() == pytest.approx([RATIOS[0] - 1 - 0.3, RATIOS[1] - 1 + 0.5])
    assert metrics.outside_clip_of("cut_high", CLIP, TOKENS, LOGS, ADVANTAGES).tolist() == [1, 0]
    assert metrics.outside_clip_of("cut_low", CLIP, TOKENS, LOGS, ADVANTAGES).tolist() == [0, 1]


def test_statistics_over_documents_and_tokens():
    def values(tokens_N, _):
        return tokens_N + 1

    assert metrics.reduced(values, "mean", None, TOKENS, LOGS) == pytest.approx(4.0)
    assert metrics.reduced(values, "mean", 4, TOKENS, LOGS) == pytest.approx(2.0)
    assert math.isnan(metrics.reduced(values, "mean", 0, TOKENS, LOGS))
    assert metrics.reduced(values, "max", 4, TOKENS, LOGS) == 5.0
    assert metrics.token_mean(values, TOKENS, LOGS, epsilon=0.0) == pytest.approx((2 * 3 + 4 * 5) / 6)
    assert metrics.token_mean(values, TOKENS, LOGS, epsilon=0.0, of=13) == pytest.approx(2.0)
    assert metrics.token_mean(values, TOKENS, LOGS, epsilon=2.0) == pytest.approx(26 / 8)
    assert math.isnan(metrics.token_mean(values, torch.zeros(1), torch.zeros(1), epsilon=0.0))


def test_declarations_list_their_columns():
    declared = metrics.per_document("ratio", "the ratio", metrics.ratio_of, "max").metric
    assert declared.read(TOKENS, LOGS, ADVANTAGES) == pytest.approx(RATIOS[0])
    read = functools.partial(metrics.token_mean, functools.partial(metrics.outside_clip_of, "cut", CLIP), epsilon=0.0)
    share = metrics.document_metric("clipped", "share", "1", declared.columns, read, by_length=True, note="n")
    assert share.metric.read(TOKENS, LOGS, ADVANTAGES) == pytest.approx(1.0)
    assert share.metric.weight == "its trained tokens"
    assert (share.canonical, share.note) == (None, "n")


def test_columns_derived_from_others():
    logs = torch.tensor([0.5, -0.5, 0.0]).double()
    inputs = LossInputs(logs, torch.zeros(3).double(), torch.tensor([2.0, 0.0, -1.0]).double())
    q = Quantities(inputs, {}, torch.ones(3, dtype=torch.bool))
    ratio = Ratio("policy", "old")
    assert metrics.outside(ratio, 0.9, 1.1).of(q).tolist() == [1, 1, 0]
    assert metrics.outside(ratio, high=1.1).of(q).tolist() == [1, 0, 0]
    assert metrics.outside(ratio).of(q).tolist() == [0, 0, 0]
    assert metrics.negation(metrics.has_sign(-1)).of(q).tolist() == [1, 1, 0]
    product = metrics.Derived(torch.mul, (Advantage(), LogRatio("policy", "old")))
    assert product.of(q).tolist() == [1, 0, 0]
    assert product.needs == ("policy", "old")
    assert metrics.outside(Ratio("policy", "ref")).of(q) is None
