"""Settings of the routers of a mixture of experts, and of layers that predict further tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from workbench.specs.groups import Group


class RoutingSpec(Group):
    """Routers of a mixture of experts: losses and biases that balance them, and routes that are replayed.

    Counts and means are those of all tokens of documents of the step, in every layout. Losses of routers are added to
    the loss, once for each mixture of the model.
    """

    balance: float = Field(0.0, ge=0)
    """Coefficient of the load-balancing loss: experts times the sum over experts of the share of routes and the mean
    probability, 1 where both are even. Without replayed routes, a forward pass without a gradient counts them first."""
    z: float = Field(0.0, ge=0)
    """Coefficient of the router z-loss: the mean square of the log-normaliser of a router's logits."""
    bias_step: float = Field(0.0, ge=0)
    """Balancing without a loss: after each step, the bias of each expert's choice rises by this where it had fewer
    routes than the mean, and falls where it had more. For models whose routers have such a bias."""
    replay: Literal["none", "recorded", "old"] = "none"
    """recorded: the experts of each token are those of the rollout dataset's extension `routes`, as its sampler or an
    earlier policy chose them; in online runs those that the sampler took, in the old pass and in training. old: in
    online runs, those of the pass that computes old log-probabilities. Gates keep their gradients."""
    record: bool = False
    """Write the routes of each step, as a file `stepNNNN.routes`, in the order of the rollout dataset."""

    @property
    def on(self) -> bool:
        """True if routes are noted or replayed."""
        return bool(self.changed)

    @property
    def replays(self) -> bool:
        """True if routes are data of the batch."""
        return self.replay != "none"

    @model_validator(mode="before")
    @classmethod
    def _check_capacity(cls, value: Any) -> Any:
        limits = [name for name in value if "capacity" in str(name)] if isinstance(value, Mapping) else []
        if limits:
            raise ValueError(
                f"{limits[0]} is not supported: with a capacity, the tokens that an expert drops depend on which come "
                "before them on its rank or in its micro-batch, so the loss depends on the layout; leave it out, "
                "no token is dropped"
            )
        return value


class PredictionSpec(Group):
    """Multi-token prediction: layers that predict further tokens of each position, and their loss.

    Depth k predicts the token k + 1 ahead, where it is of the same document and trains. Its loss is the mean negative
    log-likelihood, at temperature 1, over all such tokens of the step, in every layout; the mean over depths is added
    to the loss. Their routers, in a mixture of experts, choose by themselves.
    """

    depths: int = Field(0, ge=0)
    """Layers, one for each further token; 0: none. Weights are those of the checkpoint; tiny models draw theirs."""
    coefficient: float = Field(0.1, ge=0)
    """Weight of the loss, which is divided by the number of depths."""
    detach: Literal["nothing", "hidden_states", "policy"] = "nothing"
    """Tensors without a gradient of this loss: the decoder's last hidden states, or all of the policy (hidden states,
    embedding and head), so that only these layers train on it."""

    @property
    def on(self) -> bool:
        """True if there are such layers."""
        return self.depths > 0

    @model_validator(mode="after")
    def _check_used(self) -> PredictionSpec:
        unused = [name for name in self.changed if not self.depths]
        if unused:
            raise ValueError(
                f"prediction.{unused[0]} is of layers that there are not; give prediction.depths, 1 or more"
            )
        return self
