"""Readings of the prompt: what a sampler may have had in front of the completion instead of the recorded prompt.

drop_first:k    without its first k tokens        drop_last:k   without its last k tokens
last:n          its last n tokens                 of:j, of:+k   prompt of document j; of the k-th next one
before:ID       another token in front            after:ID      another token at its end
preceded        the whole document before it in front, as a packed row without boundaries has it
padded:ID       filled on the left to the longest prompt, without a mask
none            no prompt: nothing predicts the first token of the completion
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from workbench.mismatch.configuration import RECORDED
from workbench.mismatch.documents import Document

MOST = 16
"""Tokens that are tried to be missing at either end: a template's header or its generation prompt is shorter."""
SMALL_VOCABULARY = 512
"""Vocabulary up to which any id is tried as the one that is missing or too many."""
SMALL_BATCH = 64
"""Documents up to which each one's prompt is tried for each other one."""


def read_prefix(name: str, documents: Sequence[Document], number: int) -> tuple[int, ...]:
    """Return the tokens in front of a completion under a reading; () if there are none."""
    prompt = documents[number].prompt
    kind, _, value = name.partition(":")
    if kind == RECORDED:
        return prompt
    if kind == "drop_first":
        return prompt[int(value) :] or prompt[-1:]
    if kind == "drop_last":
        return prompt[: -int(value)] or prompt[:1]
    if kind == "last":
        return prompt[-int(value) :]
    if kind == "of":
        other = (number + int(value)) % len(documents) if value[0] in "+-" else int(value)
        return documents[other].prompt
    if kind == "before":
        return (int(value), *prompt)
    if kind == "after":
        return (*prompt, int(value))
    if kind == "preceded":
        earlier = documents[number - 1] if number else None
        return (*earlier.prompt, *earlier.completion, *prompt) if earlier else prompt
    if kind == "padded":
        longest = max(len(document.prompt) for document in documents)
        return (*[int(value)] * (longest - len(prompt)), *prompt)
    assert kind == "none", kind
    return ()


def prefix_names(documents: Sequence[Document], vocabulary_size: int, special: Sequence[int]) -> Iterator[str]:
    """Yield readings that differ from the recorded prompts in some document."""
    longest = max(len(document.prompt) for document in documents)
    shared = _shared(documents)
    firsts = [*range(1, min(longest, MOST + 1)), *([shared] if MOST < shared < longest else [])]
    ids = range(vocabulary_size) if vocabulary_size <= SMALL_VOCABULARY else sorted(set(special))
    yield from (f"drop_first:{k}" for k in firsts)
    yield from (f"drop_last:{k}" for k in range(1, min(longest, MOST + 1)))
    yield from (
        f"last:{n}" for n in sorted({*range(1, min(longest, 33)), *(longest * i // 8 for i in range(1, 8))} - {0})
    )
    yield from (f"before:{i}" for i in ids)
    yield from (f"after:{i}" for i in ids)
    if len(documents) > 1:
        yield from ("of:+1", "of:-1", "preceded")
        if len(documents) <= SMALL_BATCH:
            yield from (f"of:{j}" for j in range(len(documents)))
    if len({len(document.prompt) for document in documents}) > 1:
        yield from (f"padded:{i}" for i in sorted({0, *special}))
    yield "none"


def _shared(documents: Sequence[Document]) -> int:
    """Tokens with which all prompts begin."""
    count = 0
    for column in zip(*(document.prompt for document in documents), strict=False):
        if len(set(column)) > 1:
            break
        count += 1
    return count
