import torch

from tests.helpers.gaps import computation, recorded, records
from workbench.mismatch.configuration import Configuration
from workbench.mismatch.tokenisation import respelled

TEXTS = [*"abcdefghij", "ab", "bc", "abc", "cd", "de", "ea", "aa", "hi", "ij"]


def retokenized():
    """Records of completions in which the trainer reads "ab" for the engine's "a", "b"."""
    given = records()
    merged = []
    for number, one in enumerate(given):
        ids = one["completion_ids"]
        engine = [*ids[:3], 0, 1, *ids[5:]] if number < 4 else ids
        merged.append((one["prompt_ids"], engine, [*ids[:3], 10, *ids[5:]] if number < 4 else ids))
    values = computation(
        [{"prompt_ids": p, "completion_ids": e, "sampler_logprobs": [-1.0] * len(e)} for p, e, _ in merged]
    )
    column_T = values.column(Configuration())
    out = []
    for number, (prompt, engine, read) in enumerate(merged):
        own = column_T[values.document_T == number].tolist()
        out.append(
            {"prompt_ids": prompt, "completion_ids": read, "sampler_logprobs": own[: len(read)], "engine": engine}
        )
    return out


def test_the_engines_spelling_is_found_in_the_documents_that_have_it():
    given = retokenized()
    engine = [tuple(one.pop("engine")) for one in given]
    own = computation(given, vocabulary=TEXTS)
    name = respelled(own, Configuration(), own.column(Configuration()), recorded(own))
    assert own.readings[name] == engine
    column_T = own.column(Configuration(tokens=name))
    assert (column_T - recorded(own)).abs().max() < 5e-6


def test_without_a_vocabulary_or_a_difference_nothing_is_proposed():
    own = computation()
    assert respelled(own, Configuration(), own.column(Configuration()), recorded(own)) is None
    own.vocabulary = TEXTS
    assert respelled(own, Configuration(), own.column(Configuration()), own.column(Configuration())) is None


def test_ids_of_the_engine_are_a_reading_of_their_own_length():
    given = records()
    for one in given:
        one["sampler_ids"] = one["completion_ids"][:5]
    own = computation(given)
    column_T = own.column(Configuration(tokens="sampler_ids")).reshape(8, 12)
    assert torch.allclose(column_T[:, :5], own.column(Configuration()).reshape(8, 12)[:, :5])
    assert column_T[:, 5:].isnan().all()
