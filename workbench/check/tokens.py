"""Retokenisation: are the tokens that the trainer trains on those that the engine drew?

Letters: T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from workbench.check.stages import Mismatch
from workbench.check.verdict import Cause, Stage, StepCheck
from workbench.dumps.step import StepDump
from workbench.errors import listed
from workbench.rollouts.vocabulary import Differing, decoded, differing_runs

TOKENS = "tokens"
SHOWN = 3
"""Places that are listed; a convention."""


def with_tokens(result: StepCheck, dump: StepDump, vocabulary: Sequence[str] | None) -> StepCheck:
    """Return the check of a step with the stage of its tokens first, and what the dump cannot decide of them.

    Args:
        result: the check so far.
        dump: the step.
        vocabulary: text of each id; None: not known.

    Raises:
        SpecError: an id that the vocabulary does not have.
    """
    if "token_ids" not in dump.tokens:
        return result
    if "sampler_ids" in dump.ids:
        return _against_ids(result, dump, vocabulary)
    if dump.texts and vocabulary is not None:
        return _against_texts(result, dump, vocabulary)
    missing = "texts of its completions and no vocabulary" if dump.texts else "sampler_ids and no texts"
    sentence = f"tokens: if they are those that the engine drew; the dump has {'' if dump.texts else 'no '}{missing}"
    return replace(result, undecided=(*result.undecided, sentence))


def _against_ids(result: StepCheck, dump: StepDump, vocabulary: Sequence[str] | None) -> StepCheck:
    runs: list[tuple[int, int, Differing]] = []
    trained, total = 0, 0
    for number, at_T, own in _completions(dump):
        engine = dump.ids["sampler_ids"][number].tolist()
        if "token_mask" not in dump.tokens:  # what follows the engine's tokens and does not train is padding
            while len(own) > len(engine) and not bool(dump.loss_mask_T[at_T[len(own) - 1]]):
                own = own[:-1]
        total += len(own)
        for run in differing_runs(own, engine, vocabulary):
            runs.append((number, int(at_T[min(run.at, len(at_T) - 1)]), run))
            trained += int(dump.loss_mask_T[at_T[run.at : run.at + len(run.trainer)]].sum())
    if not runs:
        return _first(result, Stage(TOKENS, "agrees", ("sampler_ids",)))
    documents = list(dict.fromkeys(number for number, _, _ in runs))
    tokens = sum(len(run.trainer) for _, _, run in runs)
    _, place, run = runs[0]
    ids = [float(side[0]) if side else float("nan") for side in (run.trainer, run.engine)]
    mismatch = Mismatch("token_ids", ids[0], ids[1], 0.0, place, tokens, total)
    same = all(run.text is not None for _, _, run in runs)
    what = "the same text, split otherwise" if same else "other text" if vocabulary is not None else "other ids"
    also = "; sampler_logprobs from there on belong to other tokens" if "sampler_logprobs" in dump.tokens else ""
    text = (
        f"the trainer's tokens of document{'s' * (len(documents) > 1)} {listed(documents, 6)} are not those that the "
        f"engine drew ({what}), {trained} that train{also}"
    )
    places = tuple(_place(dump, place, run) for _, place, run in runs[:SHOWN])
    rest = (f"{len(runs)} such places",) if len(runs) > SHOWN else ()
    open_ = "tokens: without a vocabulary, if both encodings are the same text"
    undecided = (open_,) if vocabulary is None else ()
    stage = Stage(TOKENS, "differs", ("sampler_ids",), (mismatch,))
    cause = Cause("retokenised", text, (TOKENS,), (), TOKENS)
    return _first(result, stage, (cause,), (*places, *rest), undecided)


def _against_texts(result: StepCheck, dump: StepDump, vocabulary: Sequence[str]) -> StepCheck:
    differences: list[tuple[int, int, str]] = []
    total = 0
    for number, at_T, own in _completions(dump):
        pieces, text = decoded(own, vocabulary), dump.texts[number]
        total += len(own)
        done = 0
        for token, piece in enumerate(pieces):
            if text[done : done + len(piece)] != piece:
                if done == len(text) and not bool(dump.loss_mask_T[at_T[token:]].any()):
                    break  # padding, or an end of sequence that the text does not show
                differences.append(
                    (number, int(at_T[token]), f"{piece!r}, where the text has {text[done : done + 12]!r}")
                )
                break
            done += len(piece)
        else:
            if done < len(text):
                differences.append(
                    (number, int(at_T[-1]), f"the last token, where the text continues with {text[done:][:12]!r}")
                )
    open_ = ("tokens: if the engine split the text into the same ids; only its text was recorded",)
    if not differences:
        return _first(result, Stage(TOKENS, "agrees", ("texts",)), (), (), open_)
    documents = [number for number, _, _ in differences]
    at = differences[0][1]
    mismatch = Mismatch(
        "token_ids", float(dump.tokens["token_ids"][at]), float("nan"), 0.0, at, len(differences), total
    )
    text = (
        f"the trainer's tokens of document{'s' * (len(documents) > 1)} {listed(documents, 6)} are not the text that "
        "the engine returned"
    )
    places = tuple(f"token_ids at {dump.place(place)}: {what}" for _, place, what in differences[:SHOWN])
    stage = Stage(TOKENS, "differs", ("texts",), (mismatch,))
    return _first(result, stage, (Cause("retokenised", text, (TOKENS,), (), TOKENS),), places, open_)


def _completions(dump: StepDump) -> list[tuple[int, torch.Tensor, list[int]]]:
    """Number, places in the dump and ids of each completion, without padding."""
    ids_T = dump.tokens["token_ids"]
    kept_T = dump.tokens.get("token_mask", torch.ones_like(dump.loss_mask_T))
    lengths = torch.bincount(dump.document_ids_T, minlength=dump.num_documents).tolist()
    rows = []
    for number, at_T in enumerate(torch.arange(len(ids_T)).split(lengths)):
        own_T = at_T[kept_T[at_T]]
        if len(own_T):
            rows.append((number, own_T, ids_T[own_T].long().tolist()))
    return rows


def _place(dump: StepDump, place: int, run: Differing) -> str:
    engine, trainer = (" ".join(map(str, ids)) or "nothing" for ids in (run.engine, run.trainer))
    text = "" if run.text is None else f": both are {run.text!r}"
    return f"token_ids at {dump.place(place)}: the engine drew {engine}, the trainer has {trainer}{text}"


def _first(
    result: StepCheck,
    stage: Stage,
    causes: tuple[Cause, ...] = (),
    places: tuple[str, ...] = (),
    undecided: tuple[str, ...] = (),
) -> StepCheck:
    differs = stage.status == "differs"
    return replace(
        result,
        verdict="differs" if differs else result.verdict,
        stages=(stage, *result.stages),
        causes=(*causes, *result.causes),
        places=places if differs else result.places,
        undecided=(*result.undecided, *undecided),
    )
