"""All that a spec says of its policy reaches the one who loads it."""

from pathlib import Path

import pytest

from workbench.policy.model import load_policy
from workbench.sharding.mesh import single_process_mesh
from workbench.specs.run import RunSpec
from workbench.train import policies
from workbench.train.policies import build_policy

MODEL = {"source": "tiny-qwen3", "tied": False, "seed": 7}


def test_every_setting_is_handed_on(monkeypatch):
    """Numbers are the same without most of them, so no number would tell."""
    asked = {}
    monkeypatch.setattr(policies, "load_policy", lambda source, **given: asked.update({"source": source} | given))
    spec = RunSpec.model_validate(
        {
            "model": MODEL,
            "precision": "bfloat16",
            "policy": {
                "logprobs": "chunked",
                "fp32_head": True,
                "chunk_tokens": 8,
                "keep_bytes": 99,
                "fused_loss": True,
            },
            "layout": {"shard_parameters": True, "checkpointing": True, "sequence_parallel": True},
        }
    )
    mesh, project = single_process_mesh(), Path("somewhere")
    build_policy(spec, mesh, project, temperature=0.7)
    assert asked == MODEL | {
        "mesh": mesh,
        "project": project,
        "precision": "bfloat16",
        "temperature": 0.7,
        "implementation": "chunked",
        "fp32_head": True,
        "chunk_tokens": 8,
        "keep_bytes": 99,
        "shard_parameters": True,
        "checkpointing": True,
        "sequence_parallel": True,
        "fused_loss": True,
    }
    handed_on = set(load_policy.__kwdefaults__) - set(asked)
    assert not handed_on, "load_policy has learnt something that no spec can ask for"


@pytest.mark.parametrize(("given", "expected"), [(None, 0.7), (1.3, 1.3)])
def test_the_temperature_is_that_of_the_rollouts_unless_given(given, expected):
    spec = RunSpec.model_validate({"model": MODEL, "policy": {"temperature": given}})
    policy = build_policy(spec, single_process_mesh(), Path(), temperature=0.7)
    assert policy.temperature == expected
    assert policy.model.config.tie_word_embeddings is False
