"""Scaling contracts of other systems on real ranks: exact ones give the oracle's gradient, a mean of means does not."""

import pytest

from tests.helpers.bars import assert_float64_parity
from tests.helpers.ranks import run_ranks
from tests.parity.cases import many_steps
from tests.parity.test_layouts import LAYOUTS, settings
from tests.parity.test_oracle import documents_near, oracle
from workbench.systems.translate import scaling_contract

EXACT = [("nemo_rl", "megatron"), ("verl", "fsdp"), ("fast_llm", "main"), ("prime_rl", "fsdp")]
OTHER = [("trl", "grpo, bnpo, dr_grpo, sapo, luspo"), ("pipelinerl", "deepspeed")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The oracle, and each contract on dp = 2, cp = 2 with two micro-batches a rank."""
    documents = documents_near(11)
    cases = {
        mode: settings(
            LAYOUTS["dp2_cp2"], data={"micro_batches": 2}, denominator="document" if mode[0] == "trl" else "token"
        )
        for mode in EXACT + OTHER
    }
    for mode, case in cases.items():
        case["loss"]["compat"] = {"scaling": scaling_contract(*mode).model_dump()}
    answers = run_ranks(
        many_steps, 4, tmp_path_factory.mktemp("contracts"), [(case, documents) for case in cases.values()]
    )[0]
    return {d: oracle(documents, denominator=d) for d in ("token", "document")}, dict(zip(cases, answers, strict=True))


@pytest.mark.parametrize("mode", EXACT)
def test_an_exact_contract_gives_the_oracles_gradient(mode, found):
    truth, answers = found
    loss, expected, _ = truth["token"]
    assert answers[mode]["loss"] == pytest.approx(loss, rel=1e-12)
    assert_float64_parity(answers[mode]["gradients"], expected, context=str(mode))


def test_a_mean_of_means_changes_the_gradient(found):
    truth, answers = found
    with pytest.raises(AssertionError, match="parameters differ"):
        assert_float64_parity(answers[OTHER[0]]["gradients"], truth["document"][1], context="TRL grpo")


def test_an_engine_that_divides_unasked_leaves_its_factor(found):
    truth, answers = found
    scaled = {name: 8 * g for name, g in answers[OTHER[1]]["gradients"].items()}
    assert_float64_parity(scaled, truth["token"][1], context="two micro-batches on four ranks")
