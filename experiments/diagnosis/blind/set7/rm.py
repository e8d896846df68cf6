"""A reward model on padded pairs: margins, centred scores, a score head on the last token, two simulated ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from common import Batch, Decoder, Run, chunks, counts_of, in_order, initialise, padded, where_of
from dpo import PAIRS, write_pairs
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

STEPS, MICRO, RANKS, CENTRE = 4, 2, 2, 0.02


class Scorer(Decoder):
    """A decoder with a score for each row, read at one place."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(head=False, **settings)
        self.score = nn.Linear(self.norm.normalized_shape[0], 1, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        last: Tensor | None = None,
    ) -> Tensor:
        hidden = self.hidden(input_ids, attention_mask, position_ids)
        return self.score(hidden)[torch.arange(len(last)), last, 0].float()


def train(run: Run) -> None:
    micro, ranks = run.get("micro", MICRO), run.get("ranks", RANKS)
    model = Scorer(kernel=run.get("kernel", "sdpa"))
    initialise(model, run.seed)
    with torch.no_grad():
        g = torch.Generator().manual_seed(run.seed + 9)
        width = model.score.in_features
        if run.bug("score_head_default"):
            model.score.weight.copy_((torch.rand(1, width, generator=g) * 2 - 1) / width**0.5)
        else:
            model.score.weight.copy_(torch.randn(1, width, generator=g) / (width + 1))
    model = run.weights(model)
    if run.bug("embedding_frozen"):
        model.embed.requires_grad_(False)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad],
        lr=0.2,
        momentum=0.9,
        nesterov=True,
        foreach=run.get("foreach", True),
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    recorder = run.recorder(
        model, optimizer, dp=ranks, micro_batches=-(-PAIRS // ranks // micro), denominator="pairs", centre=CENTRE
    )
    for step in range(STEPS):
        pairs = write_pairs(run.seed, step)
        margins = torch.tensor(np.random.default_rng([run.seed, 40 + step]).choice([0.0, 0.5, 1.0, 2.0], PAIRS)).float()
        pairs = in_order(run, pairs)
        optimizer.zero_grad()
        sums = {"rank": 0.0, "centre": 0.0}
        for rank in range(ranks):
            for part in chunks(pairs[rank::ranks], micro):
                batch = padded([d for pair in part for d in pair], multiple=run.get("multiple", 1))
                last = last_of(run, batch)
                scores = model(batch.ids, attention_mask=batch.real, position_ids=batch.positions, last=last)
                good, bad = scores[0::2], scores[1::2]
                margin = margins[batch.doc[0::2].max(1).values // 2]
                if run.bug("margin_ignored"):
                    margin = torch.zeros_like(margin)
                ranking = -logsigmoid(good - bad - margin).sum() / PAIRS
                centred = CENTRE * ((good + bad) ** 2).sum() / PAIRS
                ((ranking + centred) * ranks).backward()
                sums["rank"] += ranking.item()
                sums["centre"] += centred.item()
                if run.rich:
                    seen = batch.places == last[:, None]
                    noted = where_of(batch) | {"trained": seen}
                    recorder.note(ranking + centred, counts=counts_of(batch, seen), tokens=noted)
                else:
                    recorder.note(ranking + centred)
        for p in optimizer.param_groups[0]["params"]:
            p.grad.div_(ranks)
        run.seen(model, sums["rank"] + sums["centre"])
        if run.rich:
            recorder.note(metrics={"loss/rank": sums["rank"], "loss/centre": sums["centre"]})
        torch.nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        optimizer.step()
        scheduler.step()
    recorder.close()


def last_of(run: Run, batch: Batch) -> Tensor:
    if run.bug("last_place_of_row"):
        return torch.full((len(batch.ids),), batch.ids.shape[1] - 1)
    return batch.real.int().cumsum(1).argmax(1)
