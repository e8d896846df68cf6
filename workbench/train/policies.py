"""Build the policy of a run from its spec."""

from __future__ import annotations

from pathlib import Path

from workbench.policy.model import Policy, load_policy
from workbench.sharding.mesh import Mesh
from workbench.specs.run import RunSpec


def build_policy(spec: RunSpec, mesh: Mesh, project: Path, *, temperature: float) -> Policy:
    """Load the decoder of a run and shard it for this rank.

    Args:
        spec: of the run.
        mesh: the axes.
        project: base folder of relative paths in the spec.
        temperature: of the rollouts; divides logits unless the spec sets its own.

    Raises:
        SpecError: see `workbench.policy.model.load_policy`.
    """
    model, head, layout = spec.model, spec.policy, spec.layout
    return load_policy(
        model.source,
        mesh=mesh,
        precision=spec.precision,
        temperature=head.temperature or temperature,
        implementation=head.logprobs,
        project=project,
        tied=model.tied,
        seed=model.seed,
        fp32_head=head.fp32_head,
        chunk_tokens=head.chunk_tokens,
        keep_bytes=head.keep_bytes,
        shard_parameters=layout.shard_parameters,
        checkpointing=layout.checkpointing,
        sequence_parallel=layout.sequence_parallel,
        fused_loss=head.fused_loss,
    )
