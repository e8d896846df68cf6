"""miles' policy loss in float64 (radixark/miles 31f1ca96): slime's, from which it comes, for log ratios within +-20."""

from tests.oracles.systems.slime import policy_loss

__all__ = ["policy_loss"]
