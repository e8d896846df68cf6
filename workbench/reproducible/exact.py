"""A policy in reproducible mode: the same bits in every layout, from tokens to gradients.

Letters: T tokens of a rank | D model dimension | V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from workbench.errors import ShapeError, SpecError
from workbench.policy.logprobs.head import TokenLogprobs, check_outputs, check_targets, logit_divisor
from workbench.policy.model import Policy
from workbench.reproducible import attention
from workbench.reproducible.blocks import RowBlocks
from workbench.reproducible.exact_sums import Accumulator, Leaves, Resolution, check_range, exact_square_sums
from workbench.reproducible.logprobs import ExactHead, from_hidden
from workbench.reproducible.modules import Pieces
from workbench.reproducible.shards import local_parameters, sum_over_ranks
from workbench.shapes import check_shapes
from workbench.sharding.attention import AttentionShard

EXACT_OUTPUTS = ("entropy", "logsumexp", "mean_squared_logit")
"""Head outputs that `logprobs.from_hidden` gives besides the log-probability, in its order."""


@dataclass
class Exact:
    """Reproducible mode of a policy, as returned by `install`.

    Attributes:
        policy: the policy, in reproducible mode until `remove`.
        resolution: settings that its bits depend on.
        pieces: canonical pieces, and the kernels that compute them.
        accumulators: exact sums of gradients, by the parameter's name in the model.
        head: returns the output head with its current weights, which may be sharded in between.
        remove: restores the policy to its state before `install`.
        used_bits: of the largest partial gradient of each parameter in the last step, 0 if all were zero.
        bits: gradients of this step are summed in multiples of 2^-bits, and divided by ``scale`` at the end.
        leaves: tokens and blocks that this rank has computed in this step.
    """

    policy: Policy
    resolution: Resolution
    pieces: Pieces
    accumulators: Mapping[str, Accumulator]
    head: Callable[[], ExactHead]
    remove: Callable[[], None]
    used_bits: Mapping[str, int] = field(default_factory=dict)
    bits: int = 0
    scale: float = 1.0
    leaves: Leaves = field(default_factory=Leaves)
    _rows: MutableMapping[AttentionShard, RowBlocks] = field(default_factory=WeakKeyDictionary, repr=False)
    _begun: bool = field(default=False, repr=False)

    def start(self, scale: float = 1.0, bits: int | None = None) -> None:
        """Begin a step: reset all sums, in multiples of 2^-bits, by default those of the resolution.

        The scale is a power of two that the loss is multiplied with; gradients are divided by it at the end. It keeps
        losses that are divided by many tokens above the last bit of the sums.

        Raises:
            SpecError: a scale that is not a power of two: dividing by it would round.
        """
        if scale <= 0 or not float(scale).hex().startswith("0x1.0000000000000p"):
            raise SpecError(
                f"exact.start(scale={scale})",
                rule="a power of two: multiplying with it rounds nothing",
                fix="use 2.0 ** round(log2(scale))",
            )
        self.bits, self.scale, self.leaves = self.resolution.bits if bits is None else bits, scale, Leaves()
        for accumulator in self.accumulators.values():
            accumulator.start(self.bits)
        self._begun = True

    def hidden_states(self, tokens_T: Tensor, positions_T: Tensor, shard: AttentionShard) -> Tensor:
        """Last hidden states of this rank's tokens; see `Policy.hidden_states`.

        Raises:
            ShardingError: an order that does not move whole blocks, or attention that is not gathered.
            SpecError: with a gradient, outside a step; under autocast.
        """
        if torch.is_autocast_enabled(tokens_T.device.type):
            raise SpecError(
                "hidden states in the reproducible mode",
                found="autocast is on",
                rule="every GEMM is computed in the dtype of the weights, block by block",
                fix="leave torch.autocast out, and load the policy in the desired precision",
            )
        if torch.is_grad_enabled():
            self._require_step("exact.hidden_states(...)")
        if shard not in self._rows:
            self._rows[shard] = RowBlocks.make(shard, self.resolution.block_tokens)
        blocks = self._rows[shard]
        if torch.is_grad_enabled():
            tokens, count = blocks.leaves
            self.leaves = Leaves(self.leaves.tokens + tokens, self.leaves.blocks + count)

        def attend(
            query: Tensor, key: Tensor, value: Tensor, _: AttentionShard, window: int | None, scale: float
        ) -> Tensor:
            return attention.attend(query, key, value, blocks, self.pieces, window, scale)

        return self.policy.module_hidden_states(tokens_T, positions_T, replace(shard, attend=attend))

    def token_logprobs(
        self,
        hidden_TD: Tensor,
        targets_T: Tensor,
        temperature_T: Tensor | None = None,
        *,
        outputs: Iterable[str] = ("entropy", "logsumexp"),
    ) -> TokenLogprobs:
        """Log-probability of each target, and the requested outputs; see `Policy.token_logprobs`.

        Raises:
            SpecError: an unknown output is requested.
            ShapeError: sizes disagree, a target is not in the vocabulary, a temperature is not positive and finite.
        """
        check_shapes("token_logprobs", hidden_TD=hidden_TD, targets_T=targets_T, temperature_T=temperature_T)
        check_targets("token_logprobs", targets_T)
        if bool((targets_T >= self.policy.vocabulary_size).any()):
            raise ShapeError(
                "token_logprobs: targets",
                found=f"an id of {int(targets_T.max())}",
                rule=f"0 <= id < {self.policy.vocabulary_size}; a negative id is ignored",
                fix="replace ids that are not trained by -100",
            )
        outputs = frozenset(outputs)
        check_outputs("token_logprobs", outputs, "request only those, in a tuple")
        if "mean_logit" in outputs:
            raise SpecError(
                "token_logprobs: outputs = 'mean_logit' in the reproducible mode",
                rule=f"this mode sums {', '.join(EXACT_OUTPUTS)} over the vocabulary in its own order, and no other",
                fix="leave label smoothing out, or compute without workbench.reproducible",
            )
        if temperature_T is None:
            temperature_T = torch.full(targets_T.shape, self.policy.temperature, device=hidden_TD.device)
        divisor_T = logit_divisor(temperature_T, targets_T, torch.float32)[:, 0]
        logprobs_T, *others = from_hidden(hidden_TD, targets_T, divisor_T, self.head())
        named = {f"{name}_T": output_T for name, output_T in zip(EXACT_OUTPUTS, others, strict=True) if name in outputs}
        return TokenLogprobs(logprobs_T, **named)

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce the integers over all ranks, and write each parameter's gradient to ``parameter.grad``, in its dtype.

        Collective over dp_cp and tp; once a step, after the backward of all of its rows.

        Raises:
            OutOfRange: the integers cannot hold the gradients; alike on every rank, and no gradient was written.
            SpecError: a second time in a step.
        """
        self._require_step("exact.reduce()")
        mesh = self.policy.mesh
        names, sums = list(self.accumulators), list(self.accumulators.values())
        parameters = local_parameters(self.policy)

        def finish(total: Tensor, dtype: torch.dtype) -> Tensor:
            return self.pieces.kernels.to_gradient(total, 2.0**-self.bits / self.scale, dtype)

        # Checked afterwards: before, the integers of all parameters would exist at once.
        gradients = dict(sum_over_ranks(self.accumulators, parameters, mesh, finish))
        self._begun = False
        used = check_range(sums, names, self.leaves, self.bits, [mesh["dp_cp"], mesh["tp"]])
        self.used_bits = dict(zip(names, used, strict=True))
        for name, gradient in gradients.items():
            parameters[name].leave(gradient)
        self.start(self.scale, self.bits)
        self._begun = False

    def _require_step(self, call: str) -> None:
        if not self._begun:
            raise SpecError(
                call,
                found="no step that has begun",
                rule="start(), then forward and backward of every row, then reduce(): a second reduce() would give the "
                "gradients of its own rows only",
                fix="call exact.start() before the first row of a step, and reduce() after its last",
            )

    @torch.no_grad()
    def norms(self) -> dict[str, float]:
        """L2 norm of every parameter's gradient, by name; the same bits on every rank and in every layout.

        Squares of float32 numbers are exact in float64; they are added in integers, as by `exact_sum`.

        Raises:
            SpecError: before `reduce`.
        """
        mesh, parameters = self.policy.mesh, local_parameters(self.policy)
        if missing := [name for name, one in parameters.items() if one.parameter.grad is None]:
            raise SpecError(
                "exact.norms()",
                found=f"no gradient of {missing[0]}",
                rule="reduce() writes every gradient",
                fix="call exact.reduce() first",
            )
        squares: dict[str, float] = {}
        groups: dict[tuple[str, ...], list[str]] = {}
        for name, one in parameters.items():
            groups.setdefault(one.sharded_over, []).append(name)
        for over, names in groups.items():
            sums = exact_square_sums(
                [parameters[name].gradient for name in names], self.pieces.kernels, *(mesh[axis] for axis in over)
            )
            squares |= dict(zip(names, sums, strict=True))
        return {name: squares[name] ** 0.5 for name in parameters}
