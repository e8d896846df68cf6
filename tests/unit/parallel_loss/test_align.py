"""The public API and every function behind it, on dp x cp = 2 x 2 ranks against one rank with all tokens."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.aligned_ranks import collectives, on_ranks, reduced
from workbench.errors import ShapeError, SpecError
from workbench.losses.kl import kl_estimate
from workbench.parallel_loss.align import Alignment, align_loss
from workbench.sharding.mesh import Axis, Mesh, single_process_mesh
from workbench.sharding.simulated import simulate
from workbench.specs.losses import LossSpec

ENGINES = ("sum", "mean")
GENERATOR = torch.Generator().manual_seed(3)
HIDDEN = torch.randn(2, 3, 8, generator=GENERATOR, dtype=torch.float64)
"""[dp, rows, tokens]; a cp rank holds every other token."""
OLD, REF = (torch.randn(2, 3, 8, generator=GENERATOR, dtype=torch.float64) / 10 - 1 for _ in range(2))
ADVANTAGES = torch.randn(2, 3, 8, generator=GENERATOR, dtype=torch.float64)
MASK = torch.rand(2, 3, 8, generator=GENERATOR) < 0.6
MASK[1, :, 1::2] = False  # dp 1, cp 1 has nothing that counts
MASK[0, 2] = False  # a document in which nothing counts
ALONE = Alignment(Axis("cp"), (), "sum")


def logprobs(weight, hidden):
    """Something of a weight that every token has a hand in."""
    return (weight * hidden).sin() / 10 - 1


def everything(function):
    """Value and gradient on one rank: the rows of both dp ranks."""
    weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    whole = [part.flatten(0, 1) for part in (OLD, REF, ADVANTAGES, MASK)]
    value = function(ALONE, logprobs(weight, HIDDEN.flatten(0, 1)), *whole)
    value.backward()
    return value.item(), weight.grad


def on_four(function, engine):
    """The same values by rank, and the engine's reduction of the gradients."""

    def rank(align, d, c):
        weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        local = [part[d, :, c::2] for part in (HIDDEN, OLD, REF, ADVANTAGES, MASK)]
        value = function(align, logprobs(weight, local[0]), *local[1:])
        value.backward()
        return value.item(), weight.grad

    answers = on_ranks(rank, dp=2, cp=2, engine=engine)
    return [value for value, _ in answers], reduced([gradient for _, gradient in answers], engine)


def normalised(align, policy, old, ref, advantages, mask):
    """A whole mean that tokens use, in a mean again."""
    spread = align.masked_mean(policy.square(), mask)
    return align.masked_mean(policy * align.to_tokens(spread).exp(), mask) + spread * align.masked_sum(policy, mask)


FUNCTIONS = {
    "masked_sum": lambda a, policy, old, ref, adv, mask: a.masked_sum(policy * adv, mask),
    "masked_mean": lambda a, policy, old, ref, adv, mask: a.masked_mean(policy * adv, mask),
    "masked_mean of a count": lambda a, policy, old, ref, adv, mask: a.masked_mean(policy, mask, count=a.count(mask)),
    "product of means": lambda a, policy, old, ref, adv, mask: (
        a.masked_mean(policy, mask) * a.masked_mean(policy * adv, mask).exp()
    ),
    "whole number on tokens": normalised,
    "document sums": lambda a, policy, old, ref, adv, mask: a.masked_sum(
        adv * a.document_sums(policy, mask).exp(), mask
    ),
    "sequence ratios": lambda a, policy, old, ref, adv, mask: a.masked_mean(
        adv * a.sequence_ratios(policy, old, mask), mask
    ),
    "KL by tokens": lambda a, policy, old, ref, adv, mask: a.kl_statistics(policy, ref, mask).token_mean,
    "KL by documents": lambda a, policy, old, ref, adv, mask: (
        a.kl_statistics(policy, ref, mask, estimator="k2").document_mean
    ),
    "GRPO by token": lambda a, policy, old, ref, adv, mask: a.policy_loss(
        "grpo", policy_logprobs=policy, old_logprobs=old, advantages=adv, mask=mask
    ),
    "GRPO by document, with KL": lambda a, policy, old, ref, adv, mask: a.policy_loss(
        LossSpec(name="grpo", denominator="document", kl={"coefficient": 0.3}),
        policy_logprobs=policy,
        old_logprobs=old,
        ref_logprobs=ref,
        advantages=adv,
        mask=mask,
    ),
    "GSPO": lambda a, policy, old, ref, adv, mask: a.policy_loss(
        "gspo", policy_logprobs=policy, old_logprobs=old, advantages=adv, mask=mask
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_ranks_have_value_and_gradient_of_one(name, engine):
    expected, gradient = everything(FUNCTIONS[name])
    values, result = on_four(FUNCTIONS[name], engine)
    assert values == pytest.approx([expected] * 4, rel=1e-13)
    assert result == pytest.approx(float(gradient), rel=1e-12)
    assert abs(float(gradient)) > 1e-4


def test_against_sums_that_are_written_out():
    """The functions on one rank, by plain loops over tokens."""
    policy, old, ref, advantages, mask = (
        part.flatten(0, 1) for part in (logprobs(0.7, HIDDEN), OLD, REF, ADVANTAGES, MASK)
    )
    tokens = [(b, t) for b in range(6) for t in range(8) if mask[b, t]]
    count, rows = len(tokens), {b for b, _ in tokens}
    assert (count, len(rows)) == (int(mask.sum()), 5)
    mean = sum(advantages[at].item() for at in tokens) / count
    assert ALONE.masked_mean(advantages, mask).item() == pytest.approx(mean)
    ratios = ALONE.sequence_ratios(policy, old, mask)
    for b in range(6):
        log = [float(policy[at] - old[at]) for at in tokens if at[0] == b]
        assert ratios[b, 0].item() == pytest.approx(2.718281828459045 ** (sum(log) / max(len(log), 1)))
    kl = ALONE.kl_statistics(policy, ref, mask)
    estimates = [kl_estimate(ref[at] - policy[at], "k3").item() for at in tokens]
    assert kl.token_mean.item() == pytest.approx(sum(estimates) / count)
    assert kl.document_mean.item() == pytest.approx(sum(estimates) / len(rows))
    assert kl.largest.item() == max(estimates)
    assert (int(kl.tokens), int(kl.documents)) == (count, 5)


def test_counts_of_a_step_are_those_of_all_ranks():
    def rank(align, d, c):
        mask = MASK[d, :, c::2]
        shards = align.step_counts([mask[:1], mask[1:]])
        rows = align.row_counts([MASK[d, :1], MASK[d, 1:]])
        return [int(n) for n in (align.count(mask, mask), shards.tokens, shards.documents, rows.tokens, rows.documents)]

    trained, later = int(MASK.sum()), MASK[:, :, 1:]
    expected = [2 * trained, trained, int(MASK.any(-1).sum()), int(later.sum()), int(later.any(-1).sum())]
    assert on_ranks(rank, dp=2, cp=2) == [expected] * 4


def test_micro_batches_are_parts_of_one_loss():
    spec = LossSpec(name="grpo", denominator="document")

    def whole(align, policy, old, ref, advantages, mask):
        return align.policy_loss(spec, policy_logprobs=policy, old_logprobs=old, advantages=advantages, mask=mask)

    def cut(align, policy, old, ref, advantages, mask):
        counts = align.step_counts([mask[:1], mask[1:]])
        return sum(
            align.policy_loss(
                spec,
                policy_logprobs=policy[at],
                old_logprobs=old[at],
                advantages=advantages[at],
                mask=mask[at],
                counts=counts,
            )
            for at in (slice(0, 1), slice(1, None))
        )

    expected, gradient = everything(whole)
    values, result = on_four(cut, "mean")
    assert values == pytest.approx([expected] * 4, rel=1e-13)
    assert result == pytest.approx(float(gradient), rel=1e-12)


def test_document_advantages_are_counted_only_once():
    of_documents = ADVANTAGES[:, :, 0]
    by_rank = on_ranks(
        lambda align, d, c: align.advantage_statistics(of_documents[d], of="documents", correction=1), dp=2, cp=2
    )
    for statistics in by_rank:
        assert int(statistics.count) == 6
        assert statistics.std.item() == pytest.approx(of_documents.std().item(), rel=1e-12)
    tokens = on_ranks(
        lambda align, d, c: align.advantage_statistics(ADVANTAGES[d, :, c::2], MASK[d, :, c::2]), dp=2, cp=2
    )
    assert [s.mean.item() for s in tokens] == pytest.approx([ADVANTAGES[MASK].mean().item()] * 4, rel=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_where_nothing_counts_all_is_zero(engine):
    def rank(align, d, c):
        policy = torch.full((2, 4), torch.nan, dtype=torch.float64, requires_grad=True)
        mask, values = torch.zeros(2, 4, dtype=torch.bool), torch.full((2, 4), torch.inf, dtype=torch.float64)
        loss = (
            align.masked_mean(policy, mask)
            + align.masked_sum(policy, mask)
            + align.kl_statistics(policy, values, mask).token_mean
            + align.document_sums(policy, mask).sum()
            + align.policy_loss("gspo", policy_logprobs=policy, old_logprobs=values, advantages=values, mask=mask)
        )
        loss.backward()
        return loss.item(), policy.grad.abs().max().item()

    assert on_ranks(rank, dp=2, cp=2, engine=engine) == [(0.0, 0.0)] * 4


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_rank_without_counted_tokens_enters_the_same_collectives(name):
    def rank(align, d, c):
        local = [part[d, :, c::2] for part in (HIDDEN, OLD, REF, ADVANTAGES, MASK)]
        weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        FUNCTIONS[name](align, logprobs(weight, local[0]), *local[1:]).backward()

    first, *others = collectives(rank, dp=2, cp=2, engine="mean")
    assert others == [first] * 3
    backward = name in ("document sums", "sequence ratios", "GSPO", "whole number on tokens")
    assert 2 <= len(first) <= 6 + 2 * backward, first


def test_packed_rows_need_document_ids():
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    mask, values = MASK[0, 0], ADVANTAGES[0, 0]
    by_rank = on_ranks(lambda align, d, c: align.document_sums(values[c::2], mask[c::2], documents=ids[c::2]), cp=2)
    for c, sums in enumerate(by_rank):
        expected = [float(values[(ids == i) & mask].sum()) for i in ids[c::2]]
        assert sums.tolist() == pytest.approx(expected)


def test_bfloat16_is_added_up_exactly():
    ones = torch.ones(1000, dtype=torch.bfloat16)
    total = ALONE.masked_sum(ones, torch.ones(1000, dtype=torch.bool))
    assert (total.item(), total.dtype) == (1000.0, torch.float32)


def test_the_door_takes_meshes_and_groups():
    mesh = single_process_mesh()
    assert align_loss(mesh, engine="sum") == Alignment(mesh["cp"], (mesh["dp"],), "sum")
    axis = Axis("cp", 2)
    assert align_loss(cp=axis, dp=[Axis("a", 3), Axis("b", 2)], engine="mean").factor == 12
    assert align_loss(dp=axis, engine="mean").dp == (axis,)
    assert align_loss(engine="sum").factor == 1


def test_the_factor_is_reported_with_its_reason():
    mesh = Mesh({"dp": Axis("dp", 3), "cp": Axis("cp", 2)}, torch.device("cpu"))
    text = repr(align_loss(mesh, engine="mean"))
    assert text.startswith("Alignment(loss * 6: gradients are averaged over 6 ranks (dp=3 x cp=2)")
    assert "loss * 1: gradients are summed" in repr(align_loss(mesh, engine="sum"))


def test_of_a_pipeline_the_last_stage_computes_the_loss_alone():
    """Its groups are its own: the first stage, which takes part in nothing, is not waited for, and does not count."""
    name = "GRPO by document, with KL"
    expected, gradient = everything(FUNCTIONS[name])

    def rank(mesh):
        if mesh["pp"].rank == 0:
            return None
        d, c = mesh["dp"].rank, mesh["cp"].rank
        weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        local = [part[d, :, c::2] for part in (HIDDEN, OLD, REF, ADVANTAGES, MASK)]
        align = align_loss(mesh, engine="mean")
        value = FUNCTIONS[name](align, logprobs(weight, local[0]), *local[1:])
        (value * 1.0).backward()
        return float(align.factor), value.item(), weight.grad

    results = [result for result in simulate(rank, pp=2, dp=2, cp=2) if result is not None]
    assert [factor for factor, _, _ in results] == [4.0] * 4
    assert [value for _, value, _ in results] == pytest.approx([expected] * 4, rel=1e-13)
    assert reduced([weight for _, _, weight in results], "mean") == pytest.approx(float(gradient), rel=1e-12)


def test_experts_are_reduced_over_their_replicas():
    """Four ranks, two of which share the experts: a mean over the two replicas is that of two ranks."""
    four = {"cp": Axis("cp", 2), "dp": Axis("dp", 2)}
    assert align_loss(**four, engine="mean").expert_factor(2) == 0.5
    assert align_loss(**four, engine="sum").expert_factor(2) == 1
    assert align_loss(engine="mean").expert_factor(1) == 1
    for ep in (0, 3):
        with pytest.raises(SpecError, match=rf"expert_factor\({ep}\)\n.*4 rank"):
            align_loss(**four, engine="mean").expert_factor(ep)


def test_user_errors_are_reported():
    with pytest.raises(SpecError, match="engine = 'average'"):
        align_loss(engine="average")
    with pytest.raises(SpecError, match="both a mesh and groups"):
        align_loss(single_process_mesh(), cp=Axis("cp"), engine="sum")
    with pytest.raises(ShapeError, match="a loss mask"):
        ALONE.masked_sum(torch.ones(3), torch.ones(3))
    with pytest.raises(ShapeError, match="a loss mask"):
        ALONE.count(torch.ones(3))
    with pytest.raises(SpecError, match="of = 'document'"):
        ALONE.advantage_statistics(torch.ones(3), of="document")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="tensors of one rank's tokens"):
        ALONE.masked_mean(torch.ones(3), torch.ones(4, dtype=torch.bool))
