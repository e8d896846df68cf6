import torch

from workbench.mismatch.documents import Document
from workbench.mismatch.prefixes import prefix_names, read_prefix


def document(*prompt):
    return Document(prompt, (9, 8), torch.ones(2, dtype=torch.bool), torch.zeros(2))


DOCUMENTS = [document(1, 2, 3), document(1, 2, 5, 6)]


def test_each_reading_by_hand():
    expected = {
        "recorded": (1, 2, 5, 6),
        "drop_first:1": (2, 5, 6),
        "drop_last:2": (1, 2),
        "last:1": (6,),
        "of:0": (1, 2, 3),
        "of:+1": (1, 2, 3),
        "before:7": (7, 1, 2, 5, 6),
        "after:7": (1, 2, 5, 6, 7),
        "preceded": (1, 2, 3, 9, 8, 1, 2, 5, 6),
        "none": (),
    }
    assert {name: read_prefix(name, DOCUMENTS, 1) for name in expected} == expected
    assert read_prefix("padded:0", DOCUMENTS, 0) == (0, 1, 2, 3)
    assert read_prefix("preceded", DOCUMENTS, 0) == (1, 2, 3)


def test_a_reading_never_empties_a_prompt_by_itself():
    assert read_prefix("drop_first:9", DOCUMENTS, 0) == (3,)
    assert read_prefix("drop_last:9", DOCUMENTS, 0) == (1,)


def test_the_names_can_all_be_read_and_are_few_for_a_large_vocabulary():
    names = list(prefix_names(DOCUMENTS, 40, [2]))
    assert len(names) == len(set(names))
    assert all(isinstance(read_prefix(name, DOCUMENTS, 1), tuple) for name in names)
    large = list(prefix_names(DOCUMENTS, 100_000, [2]))
    assert "before:2" in large
    assert "before:3" not in large
