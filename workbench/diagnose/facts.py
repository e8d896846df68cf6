"""Facts about the first step that differs, used by the causes: what differs, and by which factor."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Mapping
from functools import cached_property

import torch
from torch import Tensor

from workbench.diagnose.denominators import AXES, Named, names_of, sizes
from workbench.diagnose.gradient_evidence import Parameter
from workbench.diagnose.loss_facts import LossFacts
from workbench.diagnose.output_facts import OF_NOISE, OutputFacts
from workbench.diagnose.record import whole
from workbench.diagnose.token_facts import fit
from workbench.metrics.step import parameter_group, parameter_layer

ADVANTAGES = ("advantage/all/mean", "advantage/all/std", "advantage/all/min", "advantage/all/max")
"""Metrics of advantages that depend on nothing else."""
LEFT_BY_SCALING = 1e-5
"""Residue of a gradient that was multiplied by a power of two, in any precision, from sums in float32."""
OWN_FACTOR = 0.02
"""Relative distance of two changes, beyond which one is not the other: sums over tokens in bfloat16 are right to it."""
LARGEST_COUNT = 1e5
"""Beyond this, rounding makes any number a ratio of counts."""


class Facts(LossFacts):
    """The first step that differs, and the contexts of the records."""

    @property
    def counts(self) -> Mapping[str, float]:
        """Counts of the step, from the suspect, or else from the trusted record, which trained the same documents.

        With ``input_rows``, the rows of vocabulary ids that the suspect's model was given, where a recorder saw them.
        """
        rows = (self.pair[1].observed.get("inputs") or {}).get("ids", (0, 0, 0))[2]
        return {**self.pair[0].counts, **self.pair[1].counts} | ({"input_rows": rows} if rows else {})

    @cached_property
    def outputs(self) -> OutputFacts | None:
        """Outputs of the models in the step, and their gradients; None if not both recorders saw it."""
        noise = self.step.noise
        return OutputFacts.of(self.pair, noise.gradient, noise.logprob_nats / OF_NOISE)

    @cached_property
    def turned_before(self) -> bool:
        """True if in an earlier step, whose norms agree, every prediction pulled the other way."""
        others = {step.number: step for step in self.suspect.steps}
        noise = self.step.noise
        for step in self.evidence.trusted.steps:
            if step.number < self.step.number and step.number in others:
                seen = OutputFacts.of((step, others[step.number]), noise.gradient, noise.logprob_nats / OF_NOISE)
                if seen is not None and seen.forward_same and (seen.common or 1.0) < 0:
                    return True
        return False

    @property
    def forward_same(self) -> bool | None:
        """True if log-probabilities agree: those noted, or else the logits that a recorder saw."""
        known = super().forward_same
        return known if known is not None or self.outputs is None else self.outputs.forward_same

    @property
    def loss_same(self) -> bool | None:
        """True if the losses agree; None if unknown."""
        return self.step.loss_same

    @property
    def loss_proved(self) -> bool | None:
        """True if the losses agree and are not both zero within noise, which proves nothing; None if unknown."""
        return None if "loss" in self.step.silent else self.loss_same

    @property
    def gradient_same(self) -> bool | None:
        """True if the gradients agree; None if unknown."""
        return self.step.gradient_same

    @property
    def gradient_only(self) -> bool:
        """True if the gradient differs, and the loss, log-probabilities and mask are not known to."""
        return self.gradient_same is False and False not in (self.loss_same, self.forward_same, self.mask_same)

    @property
    def inputs_same(self) -> bool:
        """True if no input of the loss is known to differ."""
        return False not in (self.forward_same, self.old_same, self.mask_same) and not self.metrics_off(*ADVANTAGES)

    def metrics_off(self, *beginnings: str) -> list[str]:
        """Metrics that differ and begin with one of these prefixes."""
        return [key for key in self.step.metrics if key.startswith(beginnings)]

    # ---- the gradient as a whole -------------------------------------------------------------------------

    @cached_property
    def smaller_step(self) -> bool | None:
        """True if what is left of a step is divided by its own count, False if by the whole step's; None if unknown.

        Data that a loop was not given are in no count of it; a gradient that was lost has been counted.
        """
        times, left = (self._weights_of_what_is_left(), self._share_that_is_left)
        if times is None or left is None or left > 1 - OWN_FACTOR:
            return None
        return next((own for own, expected in ((False, 1.0), (True, 1 / left)) if _near(times, expected)), None)

    def _weights_of_what_is_left(self) -> float | None:
        outputs = self.outputs
        if outputs is not None and outputs.same_rows:
            times = [two.size / one.size for one, two in outputs.same_rows if one.size]
            return times[0] if times and max(times) - min(times) <= OWN_FACTOR * abs(times[0]) else None
        sums = [
            float(tokens["losses"].double()[tokens["trained"].bool()].sum())
            if {"losses", "trained"} <= set(tokens)
            else 0
            for tokens in (whole(step.tokens) for step in self.pair)
        ]
        if self.step.losses is None or not all(sums) or not all(self.step.losses):
            return None
        return (self.step.losses[1] / sums[1]) / (self.step.losses[0] / sums[0])

    @property
    def _share_that_is_left(self) -> float | None:
        if self.outputs is not None and self.outputs.same_rows:
            return self.outputs.trained[1] / self.outputs.trained[0]
        numbers = [
            int(tokens["trained"].sum()) for tokens in (whole(s.tokens) for s in self.pair) if "trained" in tokens
        ]
        return numbers[1] / numbers[0] if len(numbers) == 2 and numbers[0] else None

    @cached_property
    def sizes(self) -> dict[str, tuple[float, frozenset[str]]]:
        """Sizes that a factor may equal."""
        return sizes(self.context, self.counts)

    @property
    def loss_follows(self) -> bool:
        """True if the loss is wrong by the factor of the gradient."""
        factor, of_loss = self.step.factor, self.loss_factor
        return bool(
            self.loss_same is False and factor and of_loss and abs(of_loss / factor - 1) <= self.step.noise.gradient
        )

    @property
    def factor(self) -> float | None:
        """Factor of the whole gradient; that of the loss if they agree, as it is rounded less."""
        return self.loss_factor if self.loss_follows and self.step.noise.same_forward else self.step.factor

    @property
    def bar(self) -> float:
        """Tolerance for naming a factor; the rounding errors of a gradient's elements average out."""
        noise = self.step.noise
        if self.loss_follows and noise.same_forward:
            return max(1e-6, noise.loss / 2)
        return max(1e-6, noise.gradient / (15 if noise.same_forward else 5))

    @cached_property
    def factor_names(self) -> list[Named]:
        """Sizes that the factor of the whole gradient equals, if one factor explains it."""
        factor = self.factor
        return names_of(factor, self.sizes, self.bar) if factor and factor > 0 and self.step.parallel else []

    @property
    def inexact_power(self) -> bool:
        """True if a factor is a power of two, which rounds nothing, and yet the gradient was rounded."""
        factor, noise = self.step.factor, self.step.noise
        same_layout = all(self.context.get(axis) == self.evidence.trusted.context.get(axis) for axis in AXES)
        if not factor or factor <= 0 or not noise.same_forward or not same_layout or not self.scaled:
            return False
        power = math.log2(factor)
        return abs(power - round(power)) <= noise.gradient and (self.step.residue or 0.0) > LEFT_BY_SCALING

    @cached_property
    def loss_names(self) -> list[Named]:
        """Sizes that the ratio of the losses equals."""
        losses = self.step.losses
        if losses is None or not losses[0] or losses[1] / losses[0] <= 0:
            return []
        return names_of(losses[1] / losses[0], self.sizes, max(self.bar, self.step.noise.loss / 5))

    @property
    def near_name(self) -> Named | None:
        """Size that the gradient's factor equals within rounding, although the loss's more precise factor does not.

        None if the loss's own factor has a name, or the gradient's has none.
        """
        known = self.step.noise.same_forward and self.scaled and self.loss_follows
        if not known or self.factor_names or self.count_ratio is not None:
            return None
        return next(iter(names_of(self.step.factor or 0.0, self.sizes, self.step.noise.gradient / 15)), None)

    @property
    def loss_factor(self) -> float | None:
        """Ratio of the losses."""
        losses = self.step.losses
        return losses[1] / losses[0] if losses and losses[0] else None

    @property
    def norm_factor(self) -> float | None:
        """Ratio of the whole gradients' norms."""
        shares = self.step.parameters.values()
        trusted = sum(p.share**2 for p in shares)
        suspect = sum((p.share * p.ratio) ** 2 for p in shares if not math.isnan(p.ratio))
        return math.sqrt(suspect / trusted) if trusted else None

    @property
    def scaled(self) -> bool:
        """True if one factor that is not 1 explains the whole gradient."""
        factor = self.step.factor
        return bool(self.step.parallel and factor and abs(factor - 1) > self.step.noise.gradient)

    @property
    def count_ratio(self) -> tuple[str, int, int] | None:
        """Unit, right count, and the wrong count that explains the factor of the gradient; None if there is none.

        A gradient that is divided by n' where n is right is n / n' of the right one; an integer n' is hardly chance.
        """
        factor = self.factor
        if not factor or not self.scaled or not 0.1 < factor < 10:
            return None
        for name in ("trained_tokens", "documents"):
            count = self.counts.get(name, 0.0)
            for other in (count / factor, count * factor) if count and count < LARGEST_COUNT else ():
                if abs(other - round(other)) <= self.bar * other < 0.05 and round(other) != count:
                    return name.replace("_", " "), int(count), round(other)
        return None

    @property
    def terms(self) -> tuple[list[str], list[str]]:
        """Terms of the loss that differ, and those that agree and are not 0."""
        a, b = self.pair
        known = [key for key in a.metrics if key.startswith("loss/") and key in b.metrics]
        off = [key for key in known if key in self.step.metrics]
        moved = {key: abs(b.metrics[key] / a.metrics[key] - 1) for key in known if a.metrics[key]}
        least = min((moved[key] for key in off if key in moved), default=math.inf)
        return off, [key for key in moved if key not in off and moved[key] <= least / 10]

    @property
    def terms_apart(self) -> bool:
        """True if terms of the loss differ by factors of their own."""
        a, b = self.pair
        times = [b.metrics[key] / a.metrics[key] for key in self.terms[0] if a.metrics[key]]
        return len(times) > 1 and max(times) - min(times) > OWN_FACTOR * max(map(abs, times))

    @property
    def moved_by_a_term(self) -> str:
        """Clause for one term by whose change the loss has changed, from the same inputs; "" if there is none."""
        if not self.inputs_same or self.loss_same is not False or self.gradient_same is not False:
            return ""
        (a, b), losses = self.pair, self.step.losses or (0.0, 0.0)
        moved = losses[1] - losses[0]
        for key in self.terms[0]:
            of_term = b.metrics[key] - a.metrics[key]
            others = any(abs(self.pair[0].metrics[key]) < (1 - OWN_FACTOR) * abs(loss) for loss in losses)
            if others and not key.startswith("loss/total") and abs(moved - of_term) <= OWN_FACTOR * abs(moved):
                return f"the loss moves by {moved:.4g}, which is what {key} does"
        return ""

    @property
    def term_hidden(self) -> bool:
        """True if one term of the loss is wrong and others right, by so little that rounding hides it in the gradient.

        A loss that is only reported wrong is wrong in all terms.
        """
        of_loss, (off, right) = self.loss_factor, self.terms
        if not (self.gradient_same and self.loss_same is False and of_loss and right):
            return False
        return any(not key.startswith("loss/total") for key in off) and abs(of_loss - 1) < self.step.noise.gradient

    # ---- the gradient, parameter by parameter ------------------------------------------------------------

    @cached_property
    def off(self) -> dict[str, Parameter]:
        """Parameters whose gradients differ."""
        return {name: p for name, p in self.step.parameters.items() if not p.same}

    @cached_property
    def right(self) -> dict[str, Parameter]:
        """Parameters whose gradients agree."""
        return {name: p for name, p in self.step.parameters.items() if p.same}

    @property
    def clear(self) -> bool:
        """True if parameters that differ stand out: their median distance is over 3 times that of any that agrees."""
        return bool(self.off and self.right) and statistics.median(p.distance for p in self.off.values()) > 3 * max(
            p.distance for p in self.right.values()
        )

    @property
    def without_gradient(self) -> list[str]:
        """Parameters that have a gradient in the trusted record and none in the suspect."""
        return [name for name, p in self.step.parameters.items() if p.ratio == 0]

    @cached_property
    def top_off(self) -> set[str]:
        """Modules that differ in the highest layer in which anything does, by their last name.

        Backward runs from the top down, so everything above is right, and everything below inherits the error.
        """
        layers = {name: parameter_layer(name) for name in self.off}
        known = [layer for layer in layers.values() if layer is not None]
        return {short(name) for name, layer in layers.items() if known and layer == max(known)}

    @cached_property
    def above_right(self) -> bool:
        """True if something above the highest layer that differs, or in it, is right."""
        highest = max((layer for name in self.off if (layer := parameter_layer(name)) is not None), default=-1)
        return any(
            parameter_group(name) == "head"
            or (parameter_layer(name) or 0) >= highest
            or (parameter_layer(name) is None and parameter_group(name) == "norm")
            for name in self.right
        )

    def groups_off(self) -> set[str]:
        """Groups of parameters that differ."""
        return {parameter_group(name) for name in self.off}

    @property
    def all_but_embedding_scaled(self) -> float | None:
        """The factor that all parameters but the embedding share, if it is not 1 and not the embedding's; else None."""
        rest = {name: p for name, p in self.step.parameters.items() if parameter_group(name) != "embedding"}
        own = [p for name, p in self.step.parameters.items() if name not in rest]
        noise = max(1e-6, self.step.noise.gradient)
        if not own or len(rest) < 2 or any(p.cosine is None for p in rest.values()):
            return None
        factor = common_ratio(rest.values(), noise)
        if factor is None or abs(factor - 1) <= noise:
            return None
        apart = any((p.cosine is not None and p.cosine < 1 - noise) or abs(p.ratio / factor - 1) > noise for p in own)
        return factor if apart else None

    @cached_property
    def other_positions(self) -> str:
        """Clause for a table of positions whose rows with a gradient are others; "" if there is none."""
        trusted, suspect = (whole(step.gradients) for step in self.pair)
        for name in trusted:
            table = re.search(r"(^|[._])(wpe|pos|position|positions|position_embeddings|pos_emb\w*)([._]|$)", name)
            if table is None or name not in suspect or trusted[name].dim() != 2:
                continue
            rows = [each[name].abs().sum(1) > 0 for each in (trusted, suspect)]
            last = [int(each.nonzero().max()) if bool(each.any()) else -1 for each in rows]
            if rows[0].shape == rows[1].shape and last[0] != last[1]:
                return f"rows of {name} up to {last[1]} have a gradient, not up to {last[0]}: positions are others"
        return ""

    @cached_property
    def targets_shifted(self) -> str:
        """Clause for targets that are those of neighbouring tokens; "" if they are not, or not known."""
        if self.other_tokens < 0.3:
            return ""
        right, wrong = (tokens["targets"] for tokens in self.tokens)
        there = self.tokens[0]["trained"].bool() if "trained" in self.tokens[0] else right >= 0
        for shift, word in ((-1, "after"), (1, "before")):
            if float((right.roll(shift) == wrong)[there].double().mean()) > 0.75:
                return f"targets are those of the token {word}"
        return ""

    @cached_property
    def other_tokens(self) -> float:
        """Share of the trained tokens whose vocabulary ids differ; 0 if they were not noted."""
        if not all("targets" in tokens for tokens in self.tokens):
            return 0.0
        right, wrong = (tokens["targets"] for tokens in self.tokens)
        there = [tokens["trained"].bool() if "trained" in tokens else right >= 0 for tokens in self.tokens]
        return (
            float((right != wrong)[there[0] | there[1]].double().mean()) if bool((there[0] | there[1]).any()) else 0.0
        )

    @cached_property
    def elements(self) -> tuple[Tensor, Tensor]:
        """All elements of both gradients that are not 0 in the trusted one."""
        one, two = _vectors(*(whole(step.gradients) for step in self.pair))
        return one[one != 0], two[one != 0]

    @property
    def excess_of_earlier_step(self) -> tuple[float, float] | None:
        """Fit of the suspect's excess gradient to its gradient of the step before: multiple, and remainder."""
        number = self.step.number
        before = next((step for step in self.evidence.suspect.steps if step.number == number - 1), None)
        if before is None or self.gradient_same is not False or self.forward_same is False:
            return None
        one, two, old = _vectors(*(whole(step.gradients) for step in (*self.pair, before)))
        return fit(old, two - one) if len(old) else None

    @property
    def loss_moves_less(self) -> bool:
        """True if the relative change of the loss is less than a tenth of that of the gradient.

        All ratios are near 1, per token or per document; their derivatives differ.
        """
        factor, norm, of_loss = self.step.factor, self.norm_factor, self.loss_factor
        if factor is None or norm is None or of_loss is None or self.step.cosine is None:
            return False
        return abs(of_loss - 1) < 0.1 * math.sqrt(max(1 - 2 * factor + norm**2, 0.0))


def _vectors(*gradients: Mapping[str, Tensor]) -> list[Tensor]:
    """Each whole gradient as a vector in float64, of the parameters that all have in one shape."""
    shapes = [{name: values.shape for name, values in each.items()} for each in gradients]
    shared = [name for name, shape in shapes[0].items() if all(other.get(name) == shape for other in shapes)]
    nothing = torch.zeros(0).double()
    return [torch.cat([nothing, *(each[name].double().flatten() for name in shared)]) for each in gradients]


def _near(value: float, expected: float) -> bool:
    return abs(value / expected - 1) <= OWN_FACTOR


def common_ratio(parameters: Collection[Parameter], bar: float) -> float | None:
    """The factor by which every one of these gradients is multiplied; None if they share none but 0."""
    middle = statistics.median(p.ratio for p in parameters)
    straight = all(p.cosine is None or p.cosine >= 1 - bar for p in parameters)
    return middle if middle and straight and all(abs(p.ratio / middle - 1) <= bar for p in parameters) else None


def coarse(values: Tensor) -> str | None:
    """The lower precision that represents every one of these numbers exactly; None if there is none."""
    for dtype in (torch.bfloat16, torch.float16):
        if len(values) and torch.equal(values.to(dtype).to(values.dtype), values):
            return str(dtype).removeprefix("torch.")
    return None


def short(name: str) -> str:
    """The module that a parameter belongs to: ``q_proj`` of ``model.layers.0.self_attn.q_proj.weight``."""
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 and parts[-1] in ("weight", "bias") else parts[-1]
