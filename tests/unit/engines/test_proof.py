import pytest

from tests.helpers.toy_engine import ToyEngine, refusing
from workbench.engines.proof import DOCUMENTS, assert_engine_proved, prove_engine, smaller
from workbench.errors import SpecError, VerdictError


def test_equal_cases_of_several_invariants_run_once():
    seen = []

    def engine(cases):
        seen.extend(cases)
        return ToyEngine()(cases)

    prove_engine(engine)
    assert len(seen) == len(set(seen))


def test_a_counterexample_is_cut_down_to_few_tokens():
    result = prove_engine(ToyEngine("mean of micro-batch"), invariants=["accumulation"])["accumulation"]
    assert len(result.counterexample.documents) == 4
    assert sum(text.count("#") + text.count(".") for text in result.counterexample.documents) < 20
    assert result.counterexample.cases[1].startswith("1 rank(s), micro-batches of 2 documents")


def test_what_an_engine_does_not_offer_or_fails_to_run_is_no_verdict_on_it():
    proof = prove_engine(refusing)
    assert proof["ranks"].verdict == proof["resume"].verdict == "not offered"
    assert proof["ranks"].why == "one rank alone"
    assert proof.failed == ("packing",)
    assert proof["accumulation"].verdict == "holds"
    assert not proof.ok


def test_an_assertion_names_the_counterexample():
    with pytest.raises(VerdictError, match="micro-batches of 2 documents") as error:
        assert_engine_proved(ToyEngine("mean of micro-batch"), invariants=["accumulation"])
    assert "document 0: " in str(error.value.parts["found"])


def test_documents_and_names_are_checked():
    with pytest.raises(SpecError, match="accumulation"):
        prove_engine(ToyEngine(), invariants=["acumulation"])
    with pytest.raises(SpecError, match="multiple of four"):
        prove_engine(ToyEngine(), documents=DOCUMENTS[:6])


def test_smaller_documents_have_fewer_tokens():
    sizes = [sum(len(text.tokens) for text in texts) for texts in smaller(DOCUMENTS)]
    assert sizes == sorted(sizes)
    assert max(sizes) < sum(len(text.tokens) for text in DOCUMENTS)


def test_the_record_has_the_counterexample():
    record = prove_engine(ToyEngine("norm doubled"), title="toy", shrink=False).as_json()
    broken = record["invariants"]["norm_of_update"]
    assert broken["verdict"] == "broken"
    assert broken["description"].startswith("the reported norm is ")
    assert record["invariants"]["ranks"]["verdict"] == "holds"
