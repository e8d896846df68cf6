"""Losses on whole documents, every denominator, survivors: real gloo processes, documents that straddle cp ranks.

oracle = one rank = 2 and 4 ranks, loss and every parameter's gradient, float64, within 1e-12. Each wrong pairing of
adjoints in the sums over documents turns that red.
"""

from dataclasses import replace

import pytest

from tests.helpers.bars import assert_float64_parity
from tests.helpers.ranks import run_ranks
from tests.parity.cases import Meshes, as_batch, in_shared_processes, many_steps, one_step, step_on
from tests.parity.sequence_cases import CORRECTIONS, DENOMINATORS, LOSSES, Oracle, settings
from tests.unit.losses.test_document_sums import WRONG
from workbench.errors import SpecError
from workbench.rollouts.packing import pack
from workbench.sharding.mesh import single_process_mesh
from workbench.specs.run import RunSpec
from workbench.train import step as flow

CASES = LOSSES | DENOMINATORS | CORRECTIONS
LAYOUTS = {
    "cp2_contiguous": {"cp": 2, "order": "contiguous"},
    "cp2_zigzag": {"cp": 2, "order": "zigzag"},
    "cp4_zigzag": {"cp": 4, "order": "zigzag"},
    "dp2_cp2": {"dp": 2, "cp": 2, "order": "contiguous"},
}


@pytest.fixture(scope="module")
def oracle():
    return Oracle(11)


@pytest.fixture(scope="module")
def truths(oracle):
    return {name: oracle(case) for name, case in CASES.items()}


def assert_same(actual, truth, context):
    loss, gradients = truth
    assert abs(actual["loss"] - loss) <= 1e-12 * max(1, abs(loss)), context
    assert_float64_parity(actual["gradients"], gradients, context=context)


@pytest.mark.parametrize("name", CASES)
def test_one_rank_is_the_paper(name, oracle, truths):
    assert_same(one_step(settings({}, CASES[name]), oracle.documents), truths[name], name)


@pytest.mark.parametrize("name", LOSSES)
def test_the_batch_exercises_the_loss(name, oracle, truths):
    """Without a clipped and an unclipped document a wrong clip would not be seen."""
    result = one_step(settings({}, LOSSES[name]), oracle.documents)
    if name not in ("vespo", "vespo_of_sampler", "dpo"):
        clipped = result["tokens"]["clipped"][result["tokens"]["trained"]]
        assert 0 < clipped.sum() < len(clipped)
    assert max(float(g.abs().max()) for g in truths[name][1].values()) > 1e-3


CUT = {"data": {"micro_batches": 2}}
SHARES = {
    "cp2_contiguous": [(name, CUT) for name in LOSSES] + [(name, {}) for name in CORRECTIONS],
    "cp2_zigzag": [(name, {}) for name in DENOMINATORS] + [(name, CUT) for name in CORRECTIONS],
    "cp4_zigzag": [(name, {}) for name in LOSSES],
}
"""What each layout does in every run; together they do everything."""


def check(layout, chosen, oracle, truths, folder):
    shape = LAYOUTS[layout]
    cases = [(settings(shape, CASES[name], **more), oracle.documents) for name, more in chosen]
    assert_answers(layout, chosen, truths, run_ranks(many_steps, shape.get("dp", 1) * shape["cp"], folder, cases))


def assert_answers(layout, chosen, truths, per_rank):
    for rank, answers in enumerate(per_rank):
        for (name, more), answer in zip(chosen, answers, strict=True):
            assert_same(answer, truths[name], f"{layout}, {name} {more}, rank {rank}")


@pytest.fixture(scope="module")
def shares(oracle, tmp_path_factory):
    """Every rank's results of what each layout does in every run."""
    asked = {
        layout: [(settings(LAYOUTS[layout], CASES[name], **more), oracle.documents) for name, more in chosen]
        for layout, chosen in SHARES.items()
    }
    return in_shared_processes(asked, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("layout", SHARES)
def test_layout_gives_the_oracles_loss_and_gradients(layout, truths, shares):
    assert_answers(layout, SHARES[layout], truths, shares[layout])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_case_in_every_layout(layout, oracle, truths, tmp_path):
    check(layout, [(name, more) for name in CASES for more in ({}, CUT)], oracle, truths, tmp_path)


def test_ranks_with_nothing_to_train_enter_every_collective(oracle, tmp_path):
    """One document for four ranks, and then none: the same as one rank, and zeros; no rank waits."""
    longest = max(oracle.documents, key=lambda d: sum(d["loss_mask"]))
    nothing = [d | {"loss_mask": [0] * len(d["tokens"])} for d in oracle.documents]
    shape = LAYOUTS["dp2_cp2"]
    asked = [("gspo", [longest]), *((name, nothing) for name in ("gspo", "dpo", "sequence_tis_sum"))]
    answers = run_ranks(many_steps, 4, tmp_path, [(settings(shape, LOSSES[name]), some) for name, some in asked])
    alone = one_step(settings({}, LOSSES["gspo"]), [longest])
    assert [answer[0]["trained_here"] for answer in answers].count(0) >= 2
    for answer in answers:
        assert_float64_parity(answer[0]["gradients"], alone["gradients"], context="one document")
        for step in answer[1:]:
            assert step["loss"] == 0.0
            assert not any(g.any() for g in step["gradients"].values())


def test_survivors_are_another_denominator(truths):
    """The gate must reject some and keep some, or these cases would show nothing."""
    loss = {name: truths[name][0] for name in CORRECTIONS}
    assert len({round(value, 9) for value in loss.values()}) == len(loss)


def broken_step(mesh, run, documents, pairing):
    """One step whose sums over documents are completed by another collective."""
    right = flow.split_row

    def split_row(*args):
        local = right(*args)
        return replace(local, sums=replace(local.sums, complete=WRONG[pairing]))

    flow.split_row = split_row
    try:
        return step_on(mesh, run, documents)
    finally:
        flow.split_row = right


def broken_steps(cases):
    meshes = Meshes()
    return [broken_step(meshes.of(run), run, *more) for run, *more in cases]


def is_red(answer, truth):
    try:
        assert_same(answer, truth, "")
    except AssertionError:
        return True
    return False


NO_GRADIENT_THROUGH_A_SUM = ("vespo", "vespo_of_sampler", "sequence_tis_sum", "sequence_tis_mean")


def check_pairings(layout, chosen, oracle, truths, folder):
    asked = [(name, pairing) for name in chosen for pairing in WRONG]
    cases = [(settings(LAYOUTS[layout], LOSSES[name]), oracle.documents, pairing) for name, pairing in asked]
    answers = run_ranks(broken_steps, LAYOUTS[layout]["cp"], folder, cases)[0]
    for (name, pairing), answer in zip(asked, answers, strict=True):
        harmless = name in NO_GRADIENT_THROUGH_A_SUM and pairing == "sum_identity"  # nothing goes back through it
        assert is_red(answer, truths[name]) != harmless, (name, pairing)


def test_every_wrong_pairing_of_adjoints_is_red(oracle, truths, tmp_path):
    check_pairings("cp2_contiguous", ("gspo", "gmpo", "dpo", "sequence_tis_sum"), oracle, truths, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp2_contiguous", "cp4_zigzag"])
def test_every_wrong_pairing_of_every_loss_is_red(layout, oracle, truths, tmp_path):
    check_pairings(layout, LOSSES, oracle, truths, tmp_path)


EVEN = {"tokens": [3, 1, 4, 1, 5, 9, 2, 6, 5], "loss_mask": [0, 0, 0, 0, 1, 1, 1, 1, 0], "advantages": [0.7] * 9}
"""One document; padded to 10 tokens each of two ranks holds two of its four targets."""
UNCLIPPED = ({"name": "gspo", "surrogate": {"clip_low": 1.0, "clip_high": 1e6}}, None, {"denominator": "document"})


def test_a_wrong_pairing_has_a_known_factor_on_policy(tmp_path):
    """Without the backward all-reduce a token gets half of its gradient, where its document is spread evenly.

    `identity_sum` is right here and only here, where every ratio is 1 whatever the sum is: a test that starts
    on-policy would let it pass.
    """
    anything = [EVEN | {"old_logprobs": [-1.0] * 9}]
    own = one_step(settings({}, UNCLIPPED), anything)["tokens"]["policy_logprobs"]
    documents = [EVEN | {"old_logprobs": own}]
    right = one_step(settings({}, UNCLIPPED), documents)
    factors = {"sum_identity": 2, "no_reduce": 2, "averaged": 2, "identity_sum": 1}
    cases = [(settings({"cp": 2}, UNCLIPPED), documents, pairing) for pairing in factors]
    answers = run_ranks(broken_steps, 2, tmp_path, cases)[0]
    for (pairing, factor), broken in zip(factors.items(), answers, strict=True):
        scaled = {name: factor * g for name, g in broken["gradients"].items()}
        assert_float64_parity(scaled, right["gradients"], context=pairing)
        assert broken["loss"] == pytest.approx(right["loss"], rel=1e-12)


def test_a_pair_is_never_parted(oracle):
    case = LOSSES["dpo"]
    spec = RunSpec.model_validate(settings({"dp": 2}, case, data={"micro_batches": 2}))
    rows = flow.pack_step(as_batch(oracle.documents), spec)
    groups = [set(row.group_ids_N[row.document_ids_T[row.loss_mask_T].unique()].tolist()) for row in rows]
    assert sum(map(len, groups)) == len(set().union(*groups)) == 4
    loose = pack(as_batch(oracle.documents), rows=4)
    parted = [set(row.group_ids_N[row.document_ids_T[row.loss_mask_T].unique()].tolist()) for row in loose]
    assert sum(map(len, parted)) > 4, "rows that are dealt without looking at groups part a pair of this batch"


@pytest.mark.parametrize(
    ("change", "found"),
    [({"reward": 0.5}, r"2 document\(s\) with rewards \[0.5, 0.5\]"), ({"group_id": 0}, r"8 document\(s\)")],
)
def test_an_invalid_pair_is_refused_before_any_rank_starts(oracle, change, found):
    documents = [d | change for d in oracle.documents]
    spec = RunSpec.model_validate(settings({}, LOSSES["dpo"]))
    with pytest.raises(SpecError, match=found):
        flow.prepare_rows(as_batch(documents), spec, single_process_mesh())
