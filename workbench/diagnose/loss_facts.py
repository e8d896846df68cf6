"""Facts about the losses of two records: which surrogate and which denominator give each, from its own tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property

from workbench.diagnose.denominators import Way, reproduced, ways
from workbench.diagnose.loss_changes import Change, change_of_losses
from workbench.diagnose.ratios import kinds_of_ratios
from workbench.diagnose.record import Record, RecordedStep
from workbench.diagnose.surrogates import Explained, Form, explained, forms_of_tokens
from workbench.diagnose.token_facts import TokenFacts

EXACT = 1e-5
"""A loss known to a better relative precision than this distinguishes one way of dividing from a hundred others."""
STEPS = 4
"""Steps from the first that differs in which losses are explained: ratios leave 1 with the second, epochs are few."""


class LossFacts(TokenFacts):
    """Surrogates and denominators of the first step that differs, and of those after it."""

    @cached_property
    def token_losses_same(self) -> bool | None:
        """True if noted values of the loss agree in every token that trains in both; None if they were not noted."""
        if (change := self.change("losses")) is None or not len(change[0]):
            return None
        bar = (1e-4 if self.step.noise.same_forward else 10 * self.step.noise.logprob_nats) * (1 + change[0].abs())
        return bool((change[1].abs() <= bar).all())

    @cached_property
    def loss_change(self) -> Change | None:
        """The part that moved noted values of the loss, from inputs that are the same; None if none explains it."""
        others = ("advantages", "ref_logprobs", "sampler_logprobs", "ratios")
        if self.token_losses_same is not False or False in (self.forward_same, self.old_same):
            return None
        if any(self.step.token_same(name) is False for name in others):
            return None
        return change_of_losses(*self.tokens, self.context)

    @property
    def has_terms(self) -> bool:
        """True if a policy's loss has a penalty or a correction: a reference or a sampler is noted by it."""
        known = set(self.tokens[0]) & set(self.tokens[1])
        return "advantages" in known and bool({"ref_logprobs", "sampler_logprobs"} & known)

    @cached_property
    def ways(self) -> list[Way]:
        """Ways of dividing that give the suspect's loss and are not the trusted one's, nearest first."""
        if self.step.losses is None:
            return []
        if any(self.explained):
            return self._other_ways
        (a, b), context = self.pair, self.context
        bar = max(1e-9, self.step.noise.loss / (5 if self.step.noise.same_forward else 20))
        candidates, usual_ways = (
            ways(step, known, exact=bar < EXACT) for step, known in ((b, context), (a, self.evidence.trusted.context))
        )
        trusted, suspect = self.step.losses
        if not usual_ways or not candidates:
            return []
        values = self.tokens[0]["losses"][self.trained].double()
        if max(abs(trusted), abs(suspect)) <= self.step.noise.loss * float(values.abs().mean()):
            return []  # terms that cancel to 0 do so under every denominator
        scale = 0.1 * float(values.abs().mean())  # a loss may cancel, the rounding of its terms does not
        usual = {way.description for way in reproduced(usual_ways, trusted, bar * max(abs(trusted), scale))}
        hits = reproduced(candidates, suspect, bar * max(abs(suspect), scale))
        nearest = sorted(hits, key=lambda way: abs(way.loss - suspect))
        if usual or bar >= EXACT:
            return [way for way in nearest if way.description not in usual] if usual else []
        # the trusted one divides by a number of its own, as Dr. GRPO does, and so by none of these ways
        return [way for way in nearest if way.kind]

    @cached_property
    def explained(self) -> tuple[list[Explained], list[Explained]]:
        """Surrogates and denominators that give each record's own loss; see `workbench.diagnose.surrogates`."""
        return self._explained(*self.pair)

    def _explained(self, *pair: RecordedStep) -> tuple[list[Explained], list[Explained]]:
        trusted, suspect = pair
        return (
            explained(trusted, self.evidence.trusted.context, self.evidence.trusted.steps),
            explained(suspect, self.context, self.suspect.steps),
        )

    @property
    def _other_ways(self) -> list[Way]:
        """Ways of dividing the trusted surrogate that give the suspect's loss, and not the trusted one."""
        trusted, suspect = self.explained
        if _alike(trusted, suspect):
            return []
        forms = _same_forms(trusted, suspect)
        return [way for form, way in suspect if form in forms]

    @cached_property
    def other_surrogate(self) -> tuple[Form, Form] | None:
        """The surrogates of the two losses, the most alike, if no common one gives both; None if that is not known.

        Of the first step in which they are not the same: at ratios of 1 many have one value. Each is found from its own
        record, so it does not matter that the runs have parted before.
        """
        if not self.step.differs:
            return None
        found = (self._surrogates_of(*pair) for pair in self._pairs_from_here())
        return next(filter(None, found), None)

    def _pairs_from_here(self) -> Iterator[tuple[RecordedStep, RecordedStep]]:
        """Both records of the first step that differs, and of the next ones."""
        others = {step.number: step for step in self.suspect.steps}
        for step in self.evidence.trusted.steps:
            if self.step.number <= step.number < self.step.number + STEPS and step.number in others:
                yield step, others[step.number]

    def _surrogates_of(self, *pair: RecordedStep) -> tuple[Form, Form] | None:
        noted = [forms_of_tokens(step, record.context) for step, record in zip(pair, self._records, strict=True)]
        if all(noted):
            pairs = [] if set(noted[0]) & set(noted[1]) else list(itertools.product(noted[0], noted[1]))
        else:
            trusted, suspect = self.explained if pair[0] is self.pair[0] else self._explained(*pair)
            if _alike(trusted, suspect) or _same_forms(trusted, suspect):
                return None
            pairs = [
                (one.form, other.form)
                for one, other in itertools.product(trusted, suspect)
                if one.way.description == other.way.description
            ]
        return min(pairs, key=lambda pair: len(other_parts(*pair)), default=None)

    @cached_property
    def other_ratios(self) -> str:
        """Clause for noted ratios that are of one kind in one record and of another in the other; "" if not known."""
        kinds = self._kinds_of_ratios
        if not all(kinds) or kinds[0] & kinds[1] or not self.step.differs:
            return ""
        return f"noted ratios are {min(kinds[1])}, and in the trusted run {min(kinds[0])}"

    @property
    def ratios_of_one_kind(self) -> bool:
        """True if the noted ratios of both records are known to be of one kind."""
        return bool(self._kinds_of_ratios[0] & self._kinds_of_ratios[1])

    @cached_property
    def _kinds_of_ratios(self) -> tuple[set[str], set[str]]:
        kinds: list[set[str]] = []
        for record in self._records:
            known = [kinds_of_ratios(step) for step in record.steps[:STEPS]]
            kinds.append(set.intersection(*(each for each in known if each)) if any(known) else set())
        return kinds[0], kinds[1]

    @property
    def _records(self) -> tuple[Record, Record]:
        return self.evidence.trusted, self.suspect


def _alike(first: Sequence[Explained], second: Sequence[Explained]) -> bool:
    """True if one surrogate and denominator gives both losses."""
    trusted, suspect = ({(each.form, each.way.description) for each in both} for both in (first, second))
    return bool(trusted & suspect)


def _same_forms(first: Sequence[Explained], second: Sequence[Explained]) -> set[Form]:
    return {each.form for each in first} & {each.form for each in second}


def other_parts(first: Form, second: Form) -> set[str]:
    """Names of the parts in which two surrogates differ."""
    return {name for name, one, two in zip(Form._fields, first, second, strict=True) if one != two}
