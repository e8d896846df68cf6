"""A task with rewards that differ although its policy is untrained, for models without a trained policy."""

from workbench.rollouts.task import ArithmeticTask


class Digits(ArithmeticTask):
    """Rewards large digits."""

    right_reward = 1.0

    def reward(self, prompt: str, completion: str) -> float:
        """Mean digit of the completion, over 9; other characters count as 0."""
        return sum(int(symbol) for symbol in completion if symbol.isdigit()) / 9 / len(completion)
