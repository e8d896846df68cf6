"""The ratio before any step is exactly 1: old, reference and training passes compute the same bits.

The old pass has no gradient and may see other rows than a step; nothing of that may reach a log-probability.
"""

import functools
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from tests.helpers.batches import nasty_documents
from tests.helpers.interpreted_triton import repair_interpreter
from tests.helpers.online_runs import Digits, done, spec_of
from tests.helpers.ranks import run_ranks
from tests.oracles import step as paper
from workbench.errors import SpecError
from workbench.policy.decoder import tiny_qwen3
from workbench.policy.logprobs import IMPLEMENTATIONS, triton_unsupported_reason
from workbench.policy.model import CHUNKED, DTYPES, choose_implementation, load_policy
from workbench.records.directory import RunDirectory
from workbench.rollouts.batch import Extension, RolloutBatch
from workbench.rollouts.files import load
from workbench.sharding.mesh import make_mesh, single_process_mesh
from workbench.sharding.simulated import simulate
from workbench.specs.reading import merge
from workbench.specs.run import RunSpec
from workbench.train import step as flow
from workbench.train.checkpoint import build_policy
from workbench.train.old_pass import document_logprobs, with_advantages
from workbench.train.online import Online
from workbench.train.worker import run_here

if os.environ.get("TRITON_INTERPRET") == "1":
    repair_interpreter()

LAYOUTS = {
    "one_rank": {},
    "cp2_zigzag": {"cp": 2, "order": "zigzag"},
    "tp2": {"tp": 2},
    "tp2_sequence_parallel": {"tp": 2, "sequence_parallel": True},
    "dp2": {"dp": 2},
}
PRECISIONS = ("float64", "float32", "bfloat16")
CHUNK = 7
"""Tokens of a chunk: fewer than most documents have."""
LOSSES = {
    "token": {"name": "grpo"},
    "document": {"name": "gspo"},
    "pairs": {"name": "dpo"},
    "row": {"name": "kl_cov"},
    "data": {"name": "grpo", "correction": {"kind": "sequence_tis_sum"}, "entropy_coefficient": 0.01},
}
"""One loss of each way in which a fused head is cut."""


@pytest.fixture(autouse=True)
def _interpreted_tiles_may_overflow():
    """Triton's interpreter computes the rows of a tile that lie beyond the matrix, too."""
    with numpy.errstate(all="ignore"):
        yield


def cases(layout, precision):
    """(policy settings, loss, micro-batches): every head of a layout and a precision, the fused one in all its cuts."""
    for name in IMPLEMENTATIONS:
        if name == "triton":
            if layout in ({}, {"tp": 2}) and not triton_unsupported_reason(DTYPES[precision], torch.device("cpu")):
                yield {"logprobs": name, "chunk_tokens": 3 * CHUNK, "fused_loss": True}, "document", 1  # interpreted
            continue
        if name == "reference" and layout.get("tp", 1) > 1:
            continue
        head = {"logprobs": name} | ({"chunk_tokens": CHUNK} if name in CHUNKED else {})
        yield from ((head, "token", 1), (head, "pairs", 2))
        if name in CHUNKED:
            yield from (
                (head | {"fused_loss": True}, *how)
                for how in (("document", 1), ("document", 2), ("token", 2), ("pairs", 2), ("row", 1), ("data", 1))
            )
    if precision == "bfloat16":
        yield from (
            ({"fp32_head": True} | more, "document", 2) for more in ({}, {"chunk_tokens": CHUNK, "fused_loss": True})
        )


@functools.cache
def recorded():
    """Eight documents in pairs, with everything that a loss may look at, sampled at temperatures of their own."""
    results = [d for d in nasty_documents(3) if any(d["loss_mask"])]
    made = [
        {**document, "sampler_logprobs": document["old_logprobs"], "reward": float(place % 2), "group_id": place // 2}
        for place, document in enumerate(results[: 2 * (len(results) // 2)])
    ]
    batch = RolloutBatch.from_documents(made)
    temperature_T = 0.5 + (batch.document_ids_T % 3).double() / 4
    return replace(batch, extensions={"temperature_T": Extension(temperature_T, "token", "1", "of sampling", pad=1.0)})


def on_ranks(function, layout, **more):
    """The result of the first rank of a layout."""
    if layout.get("dp", 1) * layout.get("cp", 1) * layout.get("tp", 1) == 1:
        return function(single_process_mesh())
    return simulate(function, **{axis: layout.get(axis, 1) for axis in ("dp", "cp", "tp")})[0]


def not_alike(policy, spec, batch):
    """Return the number of trained tokens that a first step and the old pass rate differently, in any bit."""
    old_S = document_logprobs(policy, batch, spec, policy.mesh)
    batch = replace(batch, old_logprobs_T=old_S, ref_logprobs_T=old_S)
    rows, totals = flow.prepare_rows(batch, spec, policy.mesh)
    result = flow.run_step(
        policy,
        flow.build_loss(spec.loss),
        rows,
        totals,
        num_source=batch.num_tokens,
        loss_spec=spec.loss,
        fused=spec.policy.fused_loss,
    )
    assert int(result.tokens["trained"].sum()) == batch.num_trained_tokens > 50
    assert (old_S[batch.loss_mask_T] < 0).all()
    assert torch.equal(result.tokens["old_logprobs"], old_S.to(result.tokens["old_logprobs"]))
    return int((result.tokens["policy_logprobs"] != result.tokens["old_logprobs"])[result.tokens["trained"]].sum())


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        pytest.param(layout, precision, marks=[pytest.mark.slow] * (precision == "float64" and layout != "one_rank"))
        for layout in LAYOUTS
        for precision in PRECISIONS
    ],
)
def test_a_recorded_step_repeats_every_bit_of_its_recomputed_old_pass(layout, precision):
    """Every head of the layout, on one weight: failures are named with their settings."""

    def rank(mesh):
        whole, result = (
            load_policy(
                "tiny-qwen3",
                mesh=mesh,
                precision=precision,
                sequence_parallel=LAYOUTS[layout].get("sequence_parallel", False),
            ),
            {},
        )
        for head, loss, micro_batches in cases(LAYOUTS[layout], precision):
            spec = RunSpec.model_validate(
                {
                    "model": {"source": "tiny-qwen3"},
                    "precision": precision,
                    "layout": LAYOUTS[layout],
                    "policy": head,
                    "loss": LOSSES[loss],
                    "data": {"micro_batches": micro_batches},
                }
            )
            dtype = torch.float32 if spec.policy.fp32_head else DTYPES[precision]
            policy = replace(
                whole,
                fp32_head=spec.policy.fp32_head,
                chunk_tokens=spec.policy.chunk_tokens,
                implementation=choose_implementation(
                    spec.policy.logprobs, mesh, dtype, fused_loss=spec.policy.fused_loss
                ),
            )
            result[str(head), loss, micro_batches] = not_alike(policy, spec, recorded())
        return result

    result = on_ranks(rank, LAYOUTS[layout])
    assert len(result) >= 10
    assert {case: number for case, number in result.items() if number} == {}


ONLINE = {
    "fused": {"policy": {"fused_loss": True}},
    "fused_chunks": {"policy": {"fused_loss": True, "chunk_tokens": 3}},
    "plain": {},
    "chunked": {"policy": {"logprobs": "chunked", "chunk_tokens": 3}},
    "hotter": {"policy": {"temperature": 0.7, "fused_loss": True}},
    "checkpointed": {"layout": {"checkpointing": True}, "policy": {"fused_loss": True}},
    "truncated": {"policy": {"support": "recorded"}, "online": {"top_p": 0.8, "top_k": 12}},
    "truncated_fused": {
        "policy": {"support": "recorded", "fused_loss": True, "chunk_tokens": 3},
        "online": {"top_p": 0.8, "temperature": 0.7},
    },
}


def first_steps(mesh, spec, number):
    """Per-token values of the first optimizer steps of an online run with constant weights."""
    policy = build_policy(spec, mesh, Path(), temperature=spec.online.temperature)
    steps, actual = Online(spec, policy, Path(), task=Digits()).steps(0), []
    for _ in range(number):
        data = next(steps)
        rows, totals = flow.prepare_rows(data.documents, with_advantages(spec), mesh)
        result = flow.run_step(
            policy,
            flow.build_loss(spec.loss),
            rows,
            totals,
            num_source=data.source.num_tokens,
            loss_spec=spec.loss,
            fused=spec.policy.fused_loss,
        )
        actual.append((dict(result.tokens), data.source.ref_logprobs_T, result.metrics))
    return actual


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        *((layout, "fused_chunks") for layout in LAYOUTS),
        *(("one_rank", how) for how in ("plain", "fused", "hotter")),
        ("cp2_zigzag", "plain"),
        ("tp2_sequence_parallel", "chunked"),
        ("dp2", "checkpointed"),
        ("one_rank", "truncated"),
        ("cp2_zigzag", "truncated_fused"),
        ("tp2", "truncated_fused"),
        ("tp2", "truncated"),
    ],
)
def test_online_steps_begin_at_a_ratio_of_one_and_without_a_penalty(layout, how):
    """Two updates on parts of the samples: each is packed in its own way, and so is its old pass."""
    precision = "float64" if how == "hotter" else "bfloat16"
    settings = {
        "loss": {"name": "gspo", "kl": {"coefficient": 0.1}},
        "precision": precision,
        "online": {"updates": 2, "prompts": 2},
        "data": {"documents_per_step": 4, "micro_batches": 2},
    }
    settings = merge(settings, ONLINE[how])
    spec = spec_of(**settings | {"layout": LAYOUTS[layout] | settings.get("layout", {})})
    seen = set()
    for tokens, ref_S, metrics in on_ranks(lambda mesh: first_steps(mesh, spec, 2), LAYOUTS[layout]):
        fresh = tokens["trained"] & torch.tensor([place not in seen for place in range(len(ref_S))])
        assert fresh.any()
        assert torch.equal(tokens["policy_logprobs"][fresh], tokens["old_logprobs"][fresh])
        assert torch.equal(ref_S.to(tokens["old_logprobs"])[fresh], tokens["old_logprobs"][fresh])
        assert not tokens["would_clip"][fresh].any()
        if not seen:
            assert metrics["ratio/policy_old/mean"] == 1.0
        seen |= set(torch.nonzero(tokens["trained"])[:, 0].tolist())


def sharded(spec):
    """The first step with parameters that are sharded over both ranks; run by real ranks."""
    return first_steps(make_mesh(dp=2), spec, 1)[0]


def test_sharded_parameters_begin_at_a_ratio_of_one(tmp_path):
    spec = spec_of(
        precision="bfloat16",
        loss={"name": "gspo", "kl": {"coefficient": 0.1}},
        policy={"fused_loss": True, "chunk_tokens": 3},
        layout={"dp": 2, "shard_parameters": True, "checkpointing": True},
        data={"micro_batches": 2},
    )
    for tokens, ref_S, _ in run_ranks(sharded, 2, tmp_path, spec):
        trained = tokens["trained"]
        assert torch.equal(tokens["policy_logprobs"][trained], tokens["old_logprobs"][trained])
        assert torch.equal(ref_S.to(tokens["old_logprobs"])[trained], tokens["old_logprobs"][trained])


def test_a_run_and_its_replay_record_a_ratio_of_one(tmp_path):
    """Through the worker, and again from the saved rollout dataset of the run: the same weights and packing."""
    how = {"precision": "bfloat16", "loss": {"name": "gspo"}, "policy": {"fused_loss": True, "chunk_tokens": 5}}
    online = done(tmp_path, "online", **how, data={"micro_batches": 2})
    replayed = RunDirectory.create(
        tmp_path,
        "replayed",
        RunSpec.model_validate(
            how
            | {
                "model": {"source": "tiny-qwen3"},
                "device": "cpu",
                "data": {"path": str(online.path / "rollouts" / "step0000"), "micro_batches": 2},
            }
        ),
    )
    run_here(replayed, tmp_path)
    kept = load(online.path / "rollouts" / "step0000")
    for run in (online, replayed):
        tokens, [step] = run.read_tensors("step0000.tokens"), run.steps()
        trained = tokens["trained"]
        assert torch.equal(tokens["policy_logprobs"][trained], tokens["old_logprobs"][trained])
        assert torch.equal(tokens["policy_logprobs"][trained], kept.old_logprobs_T[trained].float())
        assert (step["ratio/policy_old/mean"], step["kl/old_policy/k3_mean"]) == (1.0, 0.0)


# ---- one place ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "tp", "fused_loss", "expected"),
    [
        ("auto", 1, False, "reference"),
        ("auto", 2, False, "vocabulary_parallel"),
        ("auto", 1, True, "chunked"),
        ("auto", 2, True, "chunked"),
        ("chunked", 1, False, "chunked"),
        ("vocabulary_parallel", 1, False, "vocabulary_parallel"),
    ],
)
def test_the_implementation_of_a_run_is_chosen_once(requested, tp, fused_loss, expected):
    def rank(mesh):
        return choose_implementation(requested, mesh, torch.float32, fused_loss=fused_loss)

    assert on_ranks(rank, {"tp": tp}) == expected
    head = {"logprobs": requested} | ({"fused_loss": True} if fused_loss else {})
    policy = build_policy(
        RunSpec.model_validate({"model": {"source": "tiny-qwen3"}, "policy": head}),
        single_process_mesh(),
        Path(),
        temperature=1.0,
    )
    assert tp > 1 or policy.implementation == expected


@pytest.mark.parametrize("requested", ["reference", "vocabulary_parallel"])
def test_heads_without_chunks_are_refused_for_a_fused_loss(requested):
    with pytest.raises(SpecError, match=f"policy.logprobs = '{requested}' with fused_loss"):
        load_policy("tiny-qwen3", implementation=requested, fused_loss=True)


def test_a_step_does_not_choose_another_head_than_its_policy_has():
    policy = load_policy("tiny-qwen3")
    spec = RunSpec.model_validate({"model": {"source": "tiny-qwen3"}, "policy": {"fused_loss": True}})
    with pytest.raises(SpecError, match="a fused step of a policy whose log-probabilities are 'reference'"):
        not_alike(policy, spec, recorded())


def test_an_old_pass_divides_each_token_by_its_own_temperature():
    """The oracle takes one document at a time, at the document's temperature."""
    spec = RunSpec.model_validate(
        {
            "model": {"source": "tiny-qwen3"},
            "precision": "float64",
            "data": {"micro_batches": 2},
            "policy": {"temperature": 3.0},
        }
    )
    policy, batch = build_policy(spec, single_process_mesh(), Path(), temperature=1.0), recorded()
    model, expected = paper.exact(tiny_qwen3(19)), []
    for number in range(batch.num_documents):
        tokens = batch.tokens_T[batch.document_ids_T == number].tolist()
        [text] = paper.document_logprobs(model, [{"tokens": tokens}], temperature=0.5 + (number % 3) / 4)
        expected += [math.nan if value is None else value.item() for value in text]
    actual, mask_S = document_logprobs(policy, batch, spec, policy.mesh), batch.loss_mask_T
    torch.testing.assert_close(actual[mask_S], torch.tensor(expected, dtype=torch.float64)[mask_S], rtol=0, atol=1e-12)
