"""The reproducible mode of a step before and after the network: the same bits in every layout."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from tests.helpers.same_bits import same_bits
from tests.parity.cases import as_batch
from tests.parity.sequence_cases import Oracle
from workbench.errors import SpecError
from workbench.policy.model import load_policy
from workbench.reduction.weights import StepTotals, TokenWeights
from workbench.reproducible import OutOfRange, Resolution
from workbench.rollouts.targets import shift_targets
from workbench.sharding.mesh import Axis, Mesh
from workbench.specs.run import RunSpec
from workbench.train import exact
from workbench.train import step as flow
from workbench.train.rows import multiples

BLOCK = 8
LAYOUTS = [
    {},
    {"dp": 2},
    {"dp": 4},
    {"cp": 4, "order": "zigzag"},
    {"dp": 2, "cp": 2, "order": "balanced", "block_tokens": BLOCK},
]
LOSSES = {
    "normalised": {"name": "ppo", "correction": {"kind": "batch_normalized", "ratio_high": 1.03}},
    "document": {"name": "gspo"},
    "prompt_group": {"name": "ppo", "denominator": "prompt_group"},
}


@pytest.fixture(scope="module")
def batch():
    return as_batch(Oracle(11).documents)


def spec_of(layout, data, loss="normalised"):
    return RunSpec.model_validate(
        {"layout": layout, "data": data, "loss": LOSSES[loss], "reproducible": {"block_tokens": BLOCK}}
    )


def ranks(layout):
    """The meshes of the ranks with different rows."""
    dp, cp = layout.get("dp", 1), layout.get("cp", 1)
    for rank in range(dp):
        axes = {"dp": Axis("dp", dp, rank), "cp": Axis("cp", cp), "tp": Axis("tp"), "dp_cp": Axis("dp_cp", dp * cp)}
        yield Mesh(axes, torch.device("cpu"))


def prepared(batch, layout, data, loss, dealt=None):
    """All that the loss is evaluated on, by name."""
    results: dict[str, Tensor] = {}
    for mesh in ranks(layout):
        rows, totals = flow.prepare_rows(batch, spec_of(layout, data, loss), mesh, dealt)
        for whole in (local.whole for local in rows):
            if not whole.row.loss_mask_T.any():
                continue
            here = {f.name: getattr(whole.row, f.name) for f in fields(whole.row)}
            here |= {f"weight {name}": pair.loss_T for name, pair in whole.weights.items()}
            here |= {"documents": torch.tensor([whole.documents.first, whole.documents.number])}
            here |= {"runs": whole.documents.segment_lengths_T}
            results |= {f"{whole.number} {name}": value for name, value in here.items() if isinstance(value, Tensor)}
        numbers = totals.statistics | {"tokens": totals.tokens, "scale": totals.scale}
        results |= {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
    return results


def assert_alike(found, expected):
    assert [name for name in expected if name not in found or not same_bits(found[name], expected[name])] == []


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_prepared_rows_are_bitwise_equal_in_every_layout(batch, layout, loss):
    expected = prepared(batch, {}, {"micro_batches": 4}, loss)
    assert_alike(prepared(batch, layout, {"micro_batches": 4 // layout.get("dp", 1)}, loss), expected)
    longer = {"micro_batches": 4 // layout.get("dp", 1), "multiple_of": 96 * 4}
    assert_alike(prepared(batch, layout, longer, loss), expected)


@pytest.mark.parametrize("loss", LOSSES)
def test_filled_rows_are_equal_although_ranks_without_documents_have_empty_ones(batch, loss):
    """All but the weights that count rows, of which there are more then."""
    expected = {
        name: value
        for name, value in prepared(batch, {}, {"micro_batch_tokens": 64}, loss).items()
        if not name.endswith("local_token")
    }
    for layout in LAYOUTS[1:]:
        assert_alike(prepared(batch, layout, {"micro_batch_tokens": 64}, loss), expected)


def test_grouping_rows_otherwise_changes_nothing(batch):
    rows = [[0, 3, 4], [1, 2], [5, 6, 7, 8], [9]]
    expected = prepared(batch, {}, {"micro_batches": 4}, "normalised", rows)
    for order in ([3, 1, 0, 2], [2, 3, 1, 0]):
        dealt = [rows[at] for at in order]
        assert_alike(prepared(batch, {"dp": 2}, {"micro_batches": 2}, "normalised", dealt), expected)


def test_a_row_ends_with_its_last_document(batch):
    row = shift_targets(batch.select([0, 1]).pad_documents(8).pad_to(64))
    kept = exact.up_to_last_document(row)
    real = torch.nonzero(row.document_ids_T >= 0).squeeze(1)
    assert len(kept.tokens_T) == int(real[-1]) + 1 < 64
    assert len(exact.up_to_last_document(shift_targets(batch.select([]).pad_to(8))).tokens_T) == 1


@pytest.mark.parametrize(("weight", "scale"), [(1 / 861, 512.0), (0.25, 2.0), (1.0, 0.5), (3.0, 0.25), (0.0, 1.0)])
def test_the_loss_is_scaled_so_that_tokens_weigh_about_one(batch, weight, scale):
    row = shift_targets(batch)
    weights_T = torch.full_like(row.advantages_T, weight).double()
    assert exact.power_of_two([row], [{"policy": TokenWeights(weights_T, weights_T)}]) == scale


@pytest.mark.parametrize(
    ("layout", "row"),
    [
        ({}, BLOCK),
        ({"cp": 2}, 2 * BLOCK),
        ({"cp": 2, "order": "zigzag"}, 4 * BLOCK),
        ({"cp": 2, "order": "balanced", "block_tokens": 24}, 48),
        ({"dp": 2, "tp": 2}, BLOCK),
    ],
)
def test_rows_are_whole_blocks_on_every_rank(layout, row):
    spec = RunSpec.model_validate({"layout": layout, "reproducible": {"block_tokens": BLOCK, "weight_chunks": 2}})
    assert multiples(spec.layout, spec.reproducible).row == row


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"multiple_of": 16}, "multiples of 32 tokens"),
        ({"micro_batch_tokens": 72}, "data.micro_batch_tokens = 72 in the reproducible mode"),
    ],
)
def test_rows_that_would_not_be_those_of_another_layout_are_refused(batch, data, words):
    with pytest.raises(SpecError, match=words):
        flow.pack_step(batch, spec_of({"cp": 2, "order": "zigzag"}, data))


# ---- range -------------------------------------------------------------------------------------------------------


class Sums:
    """Exact sums that fit a step only with some bits."""

    def __init__(self, policy, fits):
        self.resolution = Resolution(BLOCK, bits=32)
        self.used_bits, self.started, self.fits = {"a": 9, "b": 0, "c": 20}, [], fits
        policy.exact = self

    def start(self, scale, bits):
        self.started.append((scale, bits))


RESULT = flow.StepResult({}, {}, {}, {}, {}, StepTotals(1, 1))
ROW = flow.LocalRow(None, {}, None, None, None, whole="whole")


def step_with(fits):
    """A step that fails until the sums have the required bits."""
    policy = load_policy("tiny-qwen3")
    sums = Sums(policy, fits)

    @exact.within_range
    def step(policy, loss, rows, totals):
        wanted = fits(sums.started[-1][1])
        if wanted != sums.started[-1][1]:
            raise OutOfRange.because("too large", wanted)
        return RESULT

    return sums, lambda: step(policy, None, [ROW], replace(RESULT.totals, scale=8.0))


def test_a_step_is_repeated_with_fitting_bits_and_reports_it():
    sums, step = step_with(lambda bits: min(bits, 20))
    assert step().range == {"bits": 20, "used_bits": 9, "scale": 8.0, "retries": 1}
    assert sums.started == [(8.0, 32), (8.0, 20)]


def test_a_fused_step_is_refused():
    policy = load_policy("tiny-qwen3")
    Sums(policy, None)
    with pytest.raises(SpecError, match="a fused step of a policy in the reproducible mode"):
        flow.run_step(policy, None, [ROW], RESULT.totals, fused=True)


def test_the_next_step_begins_with_the_bits_of_the_spec():
    sums, step = step_with(lambda bits: min(bits, 20))
    step()
    step()
    assert [bits for _, bits in sums.started] == [32, 20, 32, 20]


@pytest.mark.parametrize(
    ("fits", "tried"),
    [
        (lambda bits: {32: 20, 20: 32}[bits], [32, 20]),
        (lambda bits: bits - 1, list(range(32, 25, -1))),
        (lambda bits: None, [32]),
    ],
)
def test_a_step_that_fits_no_bits_is_an_error_with_the_attempts(fits, tried):
    sums, step = step_with(fits)
    with pytest.raises(OutOfRange) as caught:
        step()
    assert [bits for _, bits in sums.started] == tried
    assert caught.value.__notes__ == [f"tried with {', '.join(map(str, tried))} bits"]
