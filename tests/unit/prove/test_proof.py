from dataclasses import replace

import pytest

from tests.helpers.proofs import DOCUMENT, counterexample, make_proof
from workbench.errors import SpecError
from workbench.prove.proof import InvariantResult, Proof


def proof(*verdicts):
    return Proof("mine", tuple(InvariantResult(f"invariant{at}", "", verdict) for at, verdict in enumerate(verdicts)))


def test_ok_needs_every_invariant_tested_and_no_undeclared_break():
    assert proof("holds", "declared", "skipped", "declared, but holds").ok
    assert not proof("holds", "broken").ok
    assert not proof("holds", "not tried").ok, "what was not tried is not kept"


def test_the_verdict_is_a_clause():
    assert proof("holds", "holds").verdict == "keeps all 2 invariants"
    assert proof("holds", "skipped").verdict == "keeps all 1 invariant"
    assert proof("holds", "not tried").verdict == "keeps 1 invariant; 1 not tried"
    mixed = proof("holds", "broken", "declared").verdict
    assert mixed == "breaks invariant1; breaks invariant2, as declared; keeps 1 invariant"
    assert proof("declared, but holds").kept == ("invariant0",)


def test_invariants_are_found_by_name():
    whole = make_proof()
    assert (whole.broken, whole.declared, whole.untried, whole.kept) == (
        ("cp_degree",),
        ("packing_order",),
        ("tp",),
        ("dp_split",),
    )
    assert whole["cp_degree"].factor_name == "1 / cp"
    with pytest.raises(SpecError, match="one of dp_split, cp_degree, packing_order, tp"):
        whole["pp"]


def test_the_text_has_a_table_and_the_undeclared_counterexamples():
    lines = str(make_proof()).splitlines()
    assert lines[0] == (
        "cp_left_out (engine mean): breaks cp_degree; breaks packing_order, as declared; keeps 1 invariant; "
        "1 not tried (1.2 s, seed 3)"
    )
    assert lines[2].split() == ["invariant", "verdict", "cases", "worst"]
    assert lines[3].split() == ["dp_split", "holds", "12", "3.0e-15"]
    assert lines[6].split(maxsplit=4) == ["tp", "not", "tried", "0", "no time was left"]
    assert "\n".join(lines[8:]) == f"cp_degree: {counterexample()}"
    assert str(counterexample()).splitlines() == [
        "gradient 0.5 times that of one rank: 1 / cp",
        "plain:    one rank",
        "changed:  cp=2 contiguous",
        f"document 0: {DOCUMENT}",
    ]
    assert repr(make_proof()) == str(make_proof())


def test_a_counterexample_has_its_batch():
    batch = replace(counterexample(), source=(DOCUMENT, DOCUMENT)).batch
    assert (batch.num_documents, batch.num_trained_tokens) == (2, 4)
