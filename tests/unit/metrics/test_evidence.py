"""Tokens and documents with a gradient: counted alike in every layout, head and mode, and by a slow loop."""

from pathlib import Path

import pytest

from tests.unit.compare.test_reading import batch
from workbench.metrics.evidence import SPARSE, Evidence, split_evidence, weaker
from workbench.records.directory import RunDirectory
from workbench.rollouts.files import load, save
from workbench.specs.run import RunSpec
from workbench.train.worker import run_here

ADVANTAGES = [1.0, 0.0, 2.0, -1.0, 0.0, -0.5, 1.5, -2.0]

WAYS = {
    "one rank": {},
    "no metrics": {"record": {"metrics": "none"}},
    "dp2 x cp2": {"layout": {"dp": 2, "cp": 2, "order": "zigzag"}},
    "tp2": {"layout": {"tp": 2}},
    "three micro-batches": {"data": {"micro_batches": 3}},
    "fused head": {"policy": {"fused_loss": True}},
    "fused head in chunks of 8": {"policy": {"fused_loss": True, "chunk_tokens": 8}},
    "fused head over cp": {"policy": {"fused_loss": True}, "layout": {"cp": 2}},
    "reproducible": {"precision": "float32", "reproducible": {"block_tokens": 16}, "layout": {"cp": 2}},
    "reproducible on dp2": {"precision": "float32", "reproducible": {"block_tokens": 16}, "layout": {"dp": 2}},
}


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evidence") / "rollouts"
    save(batch(ADVANTAGES), folder, provenance={"made_by": "a test"})
    return folder


def counted(tmp_path, rollouts, settings):
    base = RunSpec(
        model={"source": "tiny-qwen3"},
        precision="float64",
        data={"path": str(rollouts)},
        loss={"name": "grpo", "surrogate": {"clip_low": 0.3, "clip_high": 0.3}},
    )
    run = RunDirectory.create(tmp_path, "run", base.merged(settings))
    run_here(run, Path.cwd())
    return run, Evidence.of_steps(run.steps())


@pytest.mark.parametrize("way", WAYS)
def test_counts_are_those_of_a_loop_over_tokens(tmp_path, rollouts, way):
    run, evidence = counted(tmp_path, rollouts, WAYS[way])
    tokens, source = run.read_tensors("step0000.tokens"), load(rollouts)
    trained = reached = clipped = 0
    documents = set()
    for place in range(source.num_tokens):
        if not tokens["trained"][place]:
            continue
        trained += 1
        clipped += bool(tokens["clipped"][place])
        if source.advantages_T[place] != 0 and not tokens["clipped"][place]:
            reached += 1
            documents.add(int(source.document_ids_T[place]))
    assert 0 < clipped < trained
    assert 0 < len(documents) < 8
    assert evidence == Evidence(
        steps=1,
        documents=8,
        gradient_documents=len(documents),
        trained_tokens=trained,
        gradient_tokens=reached,
        policy_gradient_tokens=reached,
        clipped_tokens=clipped,
    )


def test_a_gradient_of_the_entropy_alone_counts(tmp_path, rollouts):
    _, evidence = counted(tmp_path, rollouts, {"loss": {"entropy_coefficient": 0.1}})
    assert evidence.gradient_tokens == evidence.trained_tokens > evidence.policy_gradient_tokens


@pytest.mark.parametrize(
    ("evidence", "nothing"),
    [
        (Evidence(1, 8, 0, 0, 0), "no token is trained"),
        (Evidence(1, 8, 0, 40, 0), "no document has a gradient"),
        (Evidence(1, 8, 0, 40, 0, 0, 40), "every trained token is clipped"),
        (Evidence(2, 8, 5, 40, 30, zero_steps=2), "every gradient is zero"),
        (Evidence(2, 8, 5, 40, 30, zero_steps=1), ""),
        (Evidence(1, 8, 1, 40, 1), ""),
    ],
)
def test_soundness_has_a_reason(evidence, nothing):
    assert nothing in evidence.nothing
    assert bool(evidence.nothing) == bool(nothing)


@pytest.mark.parametrize(
    ("evidence", "notes"),
    [
        (Evidence(1, 8, 8, 40, 40, 40, 0), []),
        (Evidence(1, 8, 4, 40, 20, 20, 20), []),
        (Evidence(1, 8, 3, 40, 30), ["only 3 of 8 documents (37.5%)"]),
        (Evidence(1, 8, 8, 40, 19, 19, 0), ["only 47.5% of the trained tokens"]),
        (
            Evidence(1, 8, 8, 40, 19, 19, 21),
            ["52.5% of the trained tokens are clipped", "only 47.5% of the trained tokens have a gradient"],
        ),
        (Evidence(1, 8, 8, 40, 40, 0, 0), ["the policy term gives no token a gradient"]),
        (Evidence(3, 8, 8, 40, 40, zero_steps=1), ["every gradient is zero in 1 of 3 steps"]),
    ],
)
def test_weak_evidence_warns_below_the_stated_share(evidence, notes):
    assert SPARSE == 0.5
    assert len(evidence.warnings) == len(notes)
    assert all(note in warning for note, warning in zip(notes, evidence.warnings, strict=True))


def test_steps_add_up_and_records_without_counts_have_none():
    step = {
        "evidence/trained_tokens/sum": 10.0,
        "evidence/gradient_tokens/sum": 6.0,
        "evidence/documents/sum": 4.0,
        "evidence/gradient_documents/sum": 3.0,
        "gradient/norm/global": 0.5,
    }
    assert Evidence.of_steps([step, step | {"gradient/norm/global": 0.0}]) == Evidence(2, 8, 6, 20, 12, zero_steps=1)
    assert Evidence.of_steps([{"step": 0, "gradient/norm/global": 0.5}]) is None
    assert split_evidence({"a/b/c": 1.0, "evidence/documents/sum": 4.0}) == (
        {"a/b/c": 1.0},
        {"evidence/documents/sum": 4.0},
    )


def test_of_two_runs_the_weaker_evidence_counts():
    strong, weak = Evidence(1, 8, 8, 40, 40), Evidence(1, 8, 1, 40, 4)
    assert weaker(strong, weak) == weaker(weak, strong) == weaker(weak, None) == weak
    assert weaker(None, None) is None
