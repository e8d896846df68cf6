"""The mutation score of an ablation, measured and required."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench.errors import SpecError, VerdictError
from workbench.mutation_score import assert_sensitive, sensitivity
from workbench.sensitivity.gates import Gate


def test_sensitivity_measures_chosen_runs_and_gates():
    ablation = {"base": {"precision": "float64", "data": {"documents_per_step": 4}}, "reference": "one"}
    ablation["configurations"] = {"one": {}, "cp2": {"layout": {"cp": 2}}}
    gate = Gate(loss=0.01, name="loss alone")
    score = sensitivity(ablation, configurations=["cp2"], faults=["missing_cp_factor"], gate=gate, remedies=False)
    assert (score.score, list(score.configurations)) == (1.0, ["cp2"])
    (gate_score,) = score.gates
    assert (gate_score.name, gate_score.killed, gate_score.survivors) == ("loss alone", 0, ("missing_cp_factor",))
    with pytest.raises(SpecError, match="cp3"):
        sensitivity(ablation, configurations=["cp3"])


def test_a_share_of_known_bugs_is_required(monkeypatch):
    """One of two faults survives a dataset without holes in masks; without any admissible fault nothing was shown."""
    ablation = {"base": {"precision": "float64", "data": {"documents_per_step": 4}}, "reference": "one"}
    ablation["configurations"] = {"one": {}, "cp2": {"layout": {"cp": 2}}}
    chosen = {"configurations": ["cp2"], "faults": ["missing_cp_factor", "tool_mask_ignored"]}
    score = assert_sensitive(ablation, at_least=0.5, **chosen)
    assert score.score == 0.5
    with pytest.raises(VerdictError, match=r"(?s)tool_mask_ignored.*at least 0\.6") as raised:
        assert_sensitive(ablation, at_least=0.6, **chosen)
    assert raised.value.judged.killed == 1
    with pytest.raises(SpecError, match="from 0 to 1"):
        assert_sensitive(ablation, at_least=60)
    monkeypatch.setattr("workbench.mutation_score.sensitivity", lambda *_, **settings: replace(score, results=()))
    with pytest.raises(VerdictError):
        assert_sensitive(ablation, at_least=0.0)
