"""Rows, a small head, and losses that couple tokens in every way, with autograd over all logits as ground truth."""

from __future__ import annotations

import torch

from workbench.policy.logprobs import TokenLogprobs, reference
from workbench.policy.logprobs.fused_loss import fused_loss

T, V, D = 41, 13, 6
IDS = torch.tensor([4] * 3 + [7] * 9 + [1] * 5 + [2] * 17 + [9] + [3] * 6)
"""Documents of 3, 9, 5, 17, 1 and 6 tokens, by labels in no order."""


class Case:
    """Rows, a head, and further inputs of losses."""

    def __init__(self, seed=0, dtype=torch.float64):
        g = torch.Generator().manual_seed(seed)
        self.hidden, self.weight = (
            torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
            for shape in ((T, D), (V, D))
        )
        self.targets = torch.randint(0, V, (T,), generator=g)
        self.active = torch.rand(T, generator=g) > 0.2
        with torch.no_grad():
            output = reference.token_logprobs(self.hidden, self.weight, self.targets)
        self.old = output.logprobs_T + 0.05 * torch.randn(T, generator=g, dtype=torch.float64).to(output.logprobs_T)
        self.advantages = torch.randn(T, generator=g, dtype=torch.float64).to(output.logprobs_T)
        self.of_document = self.advantages[IDS]
        _, self.document = IDS.unique(return_inverse=True)
        self.lengths = torch.bincount(self.document[self.active], minlength=6).to(output.logprobs_T).clamp_min(1)

    def ratio(self, said, places):
        return (said.logprobs_T - self.old[places]).exp()

    def mean_log_ratio(self, said, places):
        """Of each document, on each of its tokens that are seen."""
        gap = said.logprobs_T - self.old[places]
        sums = gap.new_zeros(6).index_add(0, self.document[places], gap) / self.lengths
        return sums[self.document[places]]

    # -- dependencies of a gradient: a token ---------------------------------------------------------------------------

    def ppo(self, said, places, low=0.95, high=1.05):
        ratio, advantages = self.ratio(said, places), self.advantages[places]
        return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()

    def every_field(self, said, places):
        return self.ppo(said, places) - 0.1 * said.entropy_T.sum() + 0.01 * said.logsumexp_T.square().sum()

    # -- a document -------------------------------------------------------------------------------------------------

    def gspo(self, said, places, low=0.98, high=1.02, kl=0.0, advantages=None):
        ratio = self.mean_log_ratio(said, places).exp()
        advantages = (self.of_document if advantages is None else advantages)[places]
        value = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()
        return value + kl * (said.logprobs_T - self.old[places]).square().sum()

    def clipped_gspo(self, said, places):
        return self.gspo(said, places, low=0.99999, high=1.00001)

    def gspo_of_tokens(self, said, places):
        """With an advantage of its own for every token."""
        return self.gspo(said, places, advantages=self.advantages)

    def gmpo(self, said, places, bound=0.04):
        gap, advantages = said.logprobs_T - self.old[places], self.of_document[places]
        cut = ((advantages > 0) & (gap > bound)) | ((advantages < 0) & (gap < -bound))
        kept = torch.where(cut, bound * advantages.sign(), gap)
        mean = gap.new_zeros(6).index_add(0, self.document[places], kept) / self.lengths
        return -(advantages * mean[self.document[places]].exp()).sum()

    def vespo(self, said, places):
        log_w = self.mean_log_ratio(said, places).detach() * self.lengths[self.document[places]]
        return -((1 + 2 * log_w - log_w.exp()).exp() * self.of_document[places] * said.logprobs_T).sum()

    def gspo_with_kl(self, said, places):
        return self.gspo(said, places, kl=0.1)

    # -- the row ----------------------------------------------------------------------------------------------------

    def across(self, said, places):
        return self.ppo(said, places) + said.logprobs_T.mean() * said.entropy_T.sum()

    def truth(self, loss, **call):
        """Loss, and gradients of hidden and weight, by autograd over every logit."""
        output = reference.token_logprobs(self.hidden, self.weight, self.targets, **call)
        places = torch.nonzero(self.active)[:, 0]
        value = loss(TokenLogprobs(*(x if x is None else x[places] for x in output)), places)
        return value.detach(), *torch.autograd.grad(value, (self.hidden, self.weight))

    def fused(self, loss, **call):
        given = {"document_ids_T": IDS, "active_T": self.active} | call
        return fused_loss(self.hidden, self.weight, self.targets, loss, **given)

    def assert_right(self, loss, *, factor=1.0, **call):
        result, (value, hidden, weight) = self.fused(loss, **call), self.truth(loss)
        torch.testing.assert_close(result.loss.detach(), value, rtol=1e-13, atol=1e-13)
        gradients = torch.autograd.grad(result.loss * factor, (self.hidden, self.weight))
        for one, other in zip(gradients, (hidden, weight), strict=True):
            torch.testing.assert_close(one, factor * other, rtol=1e-12, atol=1e-12)
        return result


TOKEN, DOCUMENT = ("ppo", "every_field"), ("gspo", "clipped_gspo", "gspo_of_tokens", "gmpo", "vespo")
MIXED, ROW = ("gspo_with_kl",), ("across",)
"""Names of losses, by what a gradient depends on: a token, a number of its document, more of it, the row."""
