import torch

from tests.helpers.gaps import computation, recorded
from workbench.mismatch import sampled
from workbench.mismatch.configuration import Configuration


def small(monkeypatch, tokens):
    monkeypatch.setattr(sampled, "BUDGET", 0.0)
    monkeypatch.setattr(sampled, "LEAST", tokens)


def test_a_tiny_model_is_searched_on_all_documents():
    own = computation()
    assert sampled.chosen(own, Configuration(), recorded(own)) == list(range(8))


def test_the_furthest_documents_are_among_the_few(monkeypatch):
    small(monkeypatch, 50)
    own = computation()
    column_T = own.column(Configuration()).clone()
    column_T[own.document_T == 5] -= 1
    numbers = sampled.chosen(own, Configuration(), column_T)
    assert 5 in numbers
    assert len(numbers) < 8


def test_a_cause_of_some_documents_is_found_in_all_of_them(monkeypatch):
    own = computation()
    column_T = own.column(Configuration()).clone()
    inside = (own.document_T == 1) | (own.document_T == 4) | (own.document_T == 6)
    column_T[inside] = own.column(Configuration(prefix="drop_first:1"))[inside]
    small(monkeypatch, 60)
    [switch] = sampled.explain_sampled(own, Configuration(), column_T).switches
    assert (switch.factor, switch.documents) == ("wrong prefix", frozenset({1, 4, 6}))


def test_readings_of_each_document_are_proposed_again(monkeypatch):
    own = computation()
    names = ["recorded"] * 8
    names[1], names[6] = "drop_first:1", "drop_last:1"
    column_T = own.column(Configuration(prefix=own.add_prefixes(names)))
    fresh = computation()
    small(monkeypatch, 60)
    explanation = sampled.explain_sampled(fresh, Configuration(), column_T)
    assert torch.allclose(explanation.column_T, column_T, atol=1e-6)
