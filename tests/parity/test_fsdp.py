"""Data-parallel training in real gloo processes: two optimizer steps, with parameters replicated and sharded.

The ground truth is the oracle on a stock model, with its own optimizer. Gradients of both steps,
their norms and the weights afterwards are those of every layout, at the float64 bar.
"""

import math
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.helpers.bars import assert_float64_parity
from tests.helpers.ranks import run_ranks
from tests.oracles.step import exact, grpo_step
from tests.parity.cases import Meshes, as_batch, many_steps
from tests.parity.test_layouts import settings
from tests.parity.test_oracle import PAPER, documents_near
from workbench.policy.decoder import tiny_qwen3
from workbench.policy.model import load_policy
from workbench.sharding import flight
from workbench.sharding.gradients import full_weights
from workbench.sharding.mesh import make_mesh
from workbench.specs.groups import OptimizerSpec
from workbench.specs.run import RunSpec
from workbench.train import step as flow
from workbench.train.optimizer import build_optimizer

LAYOUTS = {
    "dp2": {"dp": 2},
    "cp2": {"cp": 2, "order": "zigzag"},
    "dp2_cp2": {"dp": 2, "cp": 2, "order": "zigzag"},
    "dp2_tp2": {"dp": 2, "tp": 2},
    "cp2_tp2": {"cp": 2, "tp": 2, "order": "zigzag"},
    "dp2_tp2_sp": {"dp": 2, "tp": 2, "sequence_parallel": True},
}
SHARDED, AGAIN = {"shard_parameters": True}, {"shard_parameters": True, "checkpointing": True}
COPIES, KEPT = {"shard_parameters": True, "shard_ranks": 2}, {"reshard_after_forward": False}
HOW = {
    "replicated": {},
    "sharded": SHARDED,
    "sharded, kept": SHARDED | KEPT,
    "sharded, computed again": AGAIN,
    "sharded, computed again, kept": AGAIN | KEPT,
    "copies": COPIES,
    "copies, kept": COPIES | KEPT | {"unit_layers": 2},
}
"""How parameters are stored; kept: gathered weights stay from the forward of a layer to its backward; two of three
layers are one unit where several copies are kept."""
CLIP = 0.05
"""Far below the norm of the gradients here: every step is clipped."""
OPTIMIZERS = {
    "adamw": {"name": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": CLIP},
    "sgd": {"name": "sgd", "learning_rate": 0.5, "max_grad_norm": CLIP},
}


def train(mesh, given, documents):
    """Two steps under a spec: gradients, global norm and trained tokens of each, and the weights afterwards, whole."""
    spec = RunSpec.model_validate(given)
    layout = spec.layout
    policy = load_policy(
        spec.model.source,
        mesh=mesh,
        precision=spec.dtypes,
        tied=spec.model.tied,
        seed=spec.model.seed,
        shard_parameters=layout.shard_parameters,
        reshard_after_forward=layout.reshard_after_forward,
        unit_layers=layout.unit_layers,
        checkpointing=layout.checkpointing,
        sequence_parallel=layout.sequence_parallel,
        fused_loss=spec.policy.fused_loss,
    )
    optimizer, steps = build_optimizer(policy, spec), []
    for _ in range(2):
        rows, totals = flow.prepare_rows(as_batch(documents), spec, mesh)
        result = flow.run_step(
            policy,
            flow.build_loss(spec.loss),
            rows,
            totals,
            keep_gradients=True,
            loss_spec=spec.loss,
            fused=spec.policy.fused_loss,
        )
        norm = flow.clip_gradients(policy, result.norms, spec.optimizer.max_grad_norm)
        optimizer.step()
        steps.append(
            (
                float(result.loss["total"]),
                dict(result.gradients),
                norm,
                sum(int(local.row.loss_mask_T.sum()) for local in rows),
            )
        )
    return {
        "steps": steps,
        "weights": full_weights(policy.model, policy.shards, mesh),
        "held": sum(p.to_local().numel() if layout.shard_parameters else p.numel() for p in policy.model.parameters()),
    }


def train_all(cases):
    """Run several trainings in one set of processes; FSDP2's warnings are expected."""
    meshes = Meshes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [train(meshes.of(given), given, documents) for given, documents in cases]


def truth_of(documents, optimizer, *, tied):
    """The same two steps the long way."""
    model = exact(tiny_qwen3(19, tied=tied, seed=3))
    asked = OptimizerSpec.model_validate(optimizer)
    make = torch.optim.SGD if asked.name == "sgd" else torch.optim.AdamW
    step_weights = make(model.parameters(), lr=asked.learning_rate, weight_decay=asked.weight_decay)
    steps = []
    for _ in range(2):
        loss, gradients, _ = grpo_step(model, documents, **PAPER, denominator="token")
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name] * min(1.0, CLIP / norm)
        step_weights.step()
        steps.append((loss, gradients, norm))
    return steps, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def cases():
    """Settings without a layout, documents and the ground truth, by name."""
    tied, untied = documents_near(11), documents_near(11, tied=False)
    lonely = [d for d in tied if sum(d["loss_mask"]) == 0] + [max(tied, key=lambda d: len(d["tokens"]))]
    lonely_untied = [max(untied, key=lambda d: len(d["tokens"]))]
    micro, adamw, sgd = {"data": {"micro_batches": 2}}, OPTIMIZERS["adamw"], OPTIMIZERS["sgd"]
    adamw_truth, sgd_truth = truth_of(tied, adamw, tied=True), truth_of(tied, sgd, tied=True)
    return {
        "tied": ({"optimizer": adamw} | micro, tied, adamw_truth),
        "untied": ({"tied": False, "optimizer": sgd} | micro, untied, truth_of(untied, sgd, tied=False)),
        "fused": ({"optimizer": sgd, "policy": {"fused_loss": True, "chunk_tokens": 7}} | micro, tied, sgd_truth),
        "idle_rank": ({"optimizer": sgd}, lonely, truth_of(lonely, sgd, tied=True)),
        "idle_rank_untied": (
            {"tied": False, "optimizer": sgd, "policy": {"fused_loss": True, "chunk_tokens": 7}},
            lonely_untied,
            truth_of(lonely_untied, sgd, tied=False),
        ),
    }


SAMPLE = {
    2: [
        ("dp2", "tied", "sharded"),
        ("dp2", "tied", "sharded, kept"),
        ("dp2", "idle_rank", "sharded"),
        ("dp2", "idle_rank_untied", "sharded"),
        ("cp2", "untied", "replicated"),
        ("cp2", "untied", "sharded, computed again"),
        ("cp2", "untied", "sharded, computed again, kept"),
        ("cp2", "fused", "sharded"),
    ],
    4: [
        ("dp2_cp2", "tied", "sharded"),
        ("dp2_cp2", "tied", "copies"),
        ("dp2_cp2", "tied", "copies, kept"),
        ("dp2_cp2", "fused", "copies"),
        ("dp2_tp2", "untied", "replicated"),
        ("dp2_tp2", "untied", "sharded"),
        ("dp2_tp2_sp", "fused", "sharded"),
    ],
}
"""Ranks -> what they train in every run of the suite: layout, case, how."""


def assert_same_bits(actual, expected, *, context):
    """Weights gathered once or twice are the same: so are losses, gradients, norms and the trained weights."""
    for (loss, gradients, norm, _), (its_loss, its_gradients, its_norm, _) in zip(
        actual["steps"], expected["steps"], strict=True
    ):
        assert (loss, norm) == (its_loss, its_norm), context
        differing = [name for name, g in its_gradients.items() if not torch.equal(gradients[name], g)]
        assert differing == [], context
    differing = [name for name, w in expected["weights"].items() if not torch.equal(actual["weights"][name], w)]
    assert differing == [], context


def check(asked, cases, folder):
    """Run trainings in one set of processes, each compared with its ground truth."""
    given = [(settings(LAYOUTS[layout] | HOW[how], **cases[case][0]), cases[case][1]) for layout, case, how in asked]
    axes = LAYOUTS[asked[0][0]]
    answers = run_ranks(train_all, axes.get("dp", 1) * axes.get("cp", 1) * axes.get("tp", 1), folder, given)
    for rank, result in enumerate(answers):
        for (layout, case, how), actual in zip(asked, result, strict=True):
            context, (_, _, (steps, weights)) = f"{layout}, {case}, {how}, rank {rank}", cases[case]
            for (loss, gradients, norm, _), (paper_loss, paper, paper_norm) in zip(actual["steps"], steps, strict=True):
                assert abs(loss - paper_loss) <= 1e-12 * max(1, abs(paper_loss)), context
                assert_float64_parity(gradients, paper, context=context)
                assert norm == pytest.approx(paper_norm, rel=1e-12), context
                assert norm > 2 * CLIP, "every step must be clipped"
            assert_float64_parity(actual["weights"], weights, context=f"weights, {context}")
            if how != "replicated":
                ranks = 2 if how.startswith("copies") else LAYOUTS[layout].get("dp", 1) * LAYOUTS[layout].get("cp", 1)
                assert actual["held"] < 1.05 / ranks * sum(w.numel() for w in weights.values()), "a rank holds its part"
        by_name = dict(zip(asked, result, strict=True))
        for layout, case, how in asked:
            if how.endswith(", kept"):
                gathered_twice = by_name[layout, case, how.removesuffix(", kept")]
                assert_same_bits(by_name[layout, case, how], gathered_twice, context=f"{layout}, {case}, {how}")
    for number, (layout, case, _) in enumerate(asked):
        if case.startswith("idle_rank") and "dp" in layout:
            trained = [result[number]["steps"][0][3] for result in answers]
            assert 0 in trained, "one rank of the idle case must have had nothing to train"


@pytest.mark.parametrize("ranks", SAMPLE)
def test_two_steps_are_those_of_the_paper(ranks, cases, tmp_path):
    check(SAMPLE[ranks], cases, tmp_path)


def collectives_of_a_step(documents, folder):
    """Of a step with an untied head: elements of each gather and sum, and of a rank's part of each parameter.

    Then log-probabilities, again after the weights have changed, with no backward between, and after `reshard`.
    """
    spec = RunSpec.model_validate(settings(LAYOUTS["dp2"] | SHARDED, tied=False))
    mesh = make_mesh(dp=2)
    policy = load_policy(
        spec.model.source, mesh=mesh, precision=spec.dtypes, tied=False, seed=spec.model.seed, shard_parameters=True
    )
    rows, totals = flow.prepare_rows(as_batch(documents), spec, mesh)
    loss = flow.build_loss(spec.loss)
    flight.start(folder / f"rank{mesh['dp'].rank}.flight", mesh["dp"].rank)
    flow.run_step(policy, loss, rows, totals, loss_spec=spec.loss)
    entries = flight.read(folder / f"rank{mesh['dp'].rank}.flight").entries
    flight.stop()

    def logprobs():
        hidden_TD = rows[0].hidden_states(policy, None)  # whose forward leaves gathered what no backward reshards
        with torch.no_grad():
            return rows[0].token_logprobs(policy, hidden_TD, ()).logprobs_T

    before = logprobs()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.5)
    after = logprobs()
    policy.reshard()
    rows_each = {name: -(-p.shape[0] // 2) for name, p in policy.model.named_parameters()}  # the last rank's padded
    parts = {name: rows_each[name] * p.shape[1:].numel() for name, p in policy.model.named_parameters()}
    counts = [(e.name, int(e.shape)) for e in entries if e.name in ("gather_parameters", "scatter_gradients")]
    return counts, parts, before, after, logprobs()


def test_an_untied_head_is_gathered_last_and_its_gradient_summed_first(cases, tmp_path):
    _, documents, _ = cases["untied"]
    for counts, parts, before, after, again in run_ranks(collectives_of_a_step, 2, tmp_path, documents, tmp_path):
        head = parts["lm_head.weight"]
        gathered = [count for name, count in counts if name == "gather_parameters"]
        summed = [count for name, count in counts if name == "scatter_gradients"]
        layers = [sum(n for name, n in parts.items() if f"layers.{i}." in name) for i in range(3)]
        root = sum(parts.values()) - head - sum(layers)
        assert gathered[:5] == [root, *layers, head]
        assert [count // 2 for count in summed] == [head, *layers[::-1], root]
        assert not torch.allclose(before, after)
        assert torch.equal(after, again), "nothing stale"


def gathers(asked, folder):
    """Train under each spec, and return how many gathers of parameters are in the rank's flight record."""
    counts, meshes = [], Meshes()
    for number, (given, documents) in enumerate(asked):
        path = folder / f"{number}.rank{dist.get_rank()}.flight"
        flight.start(path, dist.get_rank())
        train(meshes.of(given), given, documents)
        counts.append(sum(entry.name == "gather_parameters" for entry in flight.read(path).entries))
        flight.stop()
    return counts


def test_kept_weights_of_a_layer_are_gathered_once(cases, tmp_path):
    """Per micro-batch the root once, and each layer once, or a second time for its backward; two layers as one."""
    given, documents, _ = cases["tied"]
    hows = [HOW[how] for how in ("sharded", "sharded, kept", "sharded, computed again, kept")]
    hows.append(SHARDED | {"unit_layers": 2})
    asked = [(settings(LAYOUTS["dp2"] | how, **given), documents) for how in hows]
    layers, units, micro_batches, steps = 3, 2, 2, 2
    twice, once, in_units = ((1 + each) * micro_batches * steps for each in (2 * layers, layers, 2 * units))
    assert run_ranks(gathers, 2, tmp_path, asked, tmp_path) == [[twice, once, once, in_units]] * 2


def test_pipeline_stages_gather_once_a_step(cases, tmp_path):
    """Each stage the root and its layers, 2 and 1 of 3, in the first of two micro-batches."""
    given, documents, _ = cases["tied"]
    asked = [(settings({"pp": 2, "dp": 2, "shard_parameters": True}, **given), documents)]
    layers, steps = (2, 2, 1, 1), 2
    assert run_ranks(gathers, 4, tmp_path, asked, tmp_path) == [[(1 + own) * steps] for own in layers]


def test_faults_are_seen_where_parameters_are_sharded(cases, tmp_path):
    """The sums over dp x cp are in backward then; the later reductions can still go wrong."""
    _, documents, (((loss, expected, _), _), _) = cases["tied"]
    given = settings(LAYOUTS["cp2"] | SHARDED, faults=["missing_cp_factor"])
    for [result] in run_ranks(many_steps, 2, tmp_path, [(given, documents)]):
        assert result["loss"] == pytest.approx(loss, rel=1e-12)
        doubled = {name: 2 * gradient for name, gradient in result["gradients"].items()}
        assert_float64_parity(doubled, expected, context="twice the faulty gradient")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tied", "untied", "fused", "idle_rank", "idle_rank_untied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_steps_of_every_layout_are_those_of_the_paper(layout, case, cases, tmp_path):
    check([(layout, case, how) for how in HOW], cases, tmp_path)
