"""Causes that a recorder saw by itself, in pairs of plain loops with one planted difference each."""

import json

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.diagnose.record import Record

DATA = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    """A factor kept in a buffer, and a dropout that is a function, as in the attention of many models."""

    def __init__(self, scale, rate):
        super().__init__()
        self.register_buffer("scale", torch.tensor([scale]), persistent=False)
        self.attention_dropout = rate

    def forward(self, hidden):
        return nn.functional.dropout(self.scale * hidden, self.attention_dropout, self.training)


class Loop:
    """A loop that trains for some steps; a subclass or a keyword plants the difference."""

    def __init__(
        self,
        folder,
        *,
        seed=0,
        dropout=0.0,
        dtype=torch.float32,
        frozen=(),
        clip=None,
        autocast=False,
        scale=1.0,
        config=None,
        rate=0.0,
        **adamw,
    ):
        torch.manual_seed(seed)
        layers = nn.Linear(6, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 1), Scaled(scale, rate)
        model = nn.Sequential(*layers).to(dtype)
        model.config = config or {"scale": 1.0, "use_cache": False}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        self.model, self.clip, self.autocast = model, clip, autocast
        kind = adamw.pop("kind", torch.optim.AdamW)
        self.optimizer = kind(model.parameters(), **{"lr": 0.01} | adamw)
        self.folder = folder

    def run(self, steps=3, update=lambda optimizer: optimizer.step()):
        with wb.Recorder(self.folder, self.model, self.optimizer, gradients="full") as recorder:
            for _ in range(steps):
                self.optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                    loss = self.model(DATA.to(next(self.model.parameters()).dtype)).float().square().mean()
                loss.backward()
                recorder.note(loss)
                if self.clip:
                    nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
                update(self.optimizer)
        return self.folder


def pair(tmp_path, trusted=None, suspect=None):
    return wb.diagnose(Loop(tmp_path / "right", **trusted or {}).run(), Loop(tmp_path / "wrong", **suspect or {}).run())


@pytest.mark.parametrize(
    ("suspect", "cause", "reason"),
    [
        ({"seed": 1}, "initial_weights", "checksum of the initial weights"),
        ({"frozen": ("0.bias",)}, "other_parameters", "0.bias: trains False, not True"),
        ({"dropout": 0.3}, "dropout", "in step 0 1 modules drop, not 0"),
        ({"lr": 0.02}, "optimizer_settings", "in step 0: lr of group 0 is 0.02, not 0.01"),
        ({"betas": (0.9, 0.95)}, "optimizer_settings", "betas of group 0 is [0.9, 0.95], not [0.9, 0.999]"),
        ({"weight_decay": 0.5}, "optimizer_settings", "weight_decay of group 0 is 0.5"),
        ({"kind": torch.optim.SGD}, "optimizer_settings", "SGD, not AdamW"),
        ({"clip": 1e-3, "kind": torch.optim.AdamW, "eps": 1e-8}, "optimizer_settings", "clipped to 0.001, where"),
        ({"dtype": torch.bfloat16}, "precision_settings", "weights in bfloat16, not float32"),
        ({"scale": 1.5}, "model_settings", "buffers have other values: 4.scale"),
        (
            {"scale": 1.5, "config": {"scale": 1.5, "use_cache": True}},
            "model_settings",
            "scale of the model's config is 1.5",
        ),
        ({"rate": 0.3}, "dropout", "in step 0 1 modules drop, not 0"),
    ],
)
def test_a_difference_that_was_seen_is_named_first(suspect, cause, reason, tmp_path):
    diagnosis = pair(tmp_path, suspect=suspect)
    assert diagnosis.causes[0].name == cause or diagnosis.equal, str(diagnosis)
    assert any(reason in each for each in diagnosis[cause].evidence), str(diagnosis)


def test_the_same_settings_are_equal(tmp_path):
    diagnosis = pair(tmp_path, {"clip": 0.1}, {"clip": 0.1})
    assert diagnosis.equal
    assert [each.name for each in diagnosis.causes] == ["no_difference"]


def test_a_state_that_is_lost_between_steps(tmp_path):
    def lost(optimizer):
        optimizer.step()
        optimizer.state.clear()

    right, wrong = Loop(tmp_path / "right").run(), Loop(tmp_path / "wrong").run(update=lost)
    diagnosis = wb.diagnose(right, wrong)
    assert diagnosis.causes[0].name == "optimizer_state", str(diagnosis)
    assert diagnosis.causes[0].evidence == ("before step 1 its state has counted 0 updates, not 1",)


@pytest.mark.parametrize(("bound", "score"), [(0.1, 0.9), (0.1234, 0.45)])
def test_a_gradient_that_the_loop_clips_itself(bound, score, tmp_path):
    def clipped(optimizer):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = torch.cat([parameter.grad.flatten() for parameter in parameters]).norm()
        for parameter in parameters:
            parameter.grad.mul_((bound / norm).clamp_max(1.0))
        optimizer.step()

    sgd = {"kind": torch.optim.SGD, "lr": 1e-4}
    right, wrong = Loop(tmp_path / "right", **sgd).run(steps=1), Loop(tmp_path / "wrong", **sgd).run(1, clipped)
    diagnosis = wb.diagnose(right, wrong)
    assert (diagnosis.causes[0].name == "gradient_clipping") == (score == 0.9), str(diagnosis)


def test_settings_of_a_model_without_effect_are_no_difference(tmp_path):
    assert pair(tmp_path, suspect={"config": {"scale": 1.0, "use_cache": True, "name": "other"}}).equal


@pytest.mark.parametrize("pieces", ["each", "added"])
def test_pieces_of_a_gradient_that_were_clipped_one_by_one(pieces, tmp_path):
    """Each micro-batch, or what was added so far; the loop takes its gradients before the clip of the whole."""

    def clipped_in_pieces(folder, pieces):
        loop = Loop(folder, seed=1)
        parameters = list(loop.model.parameters())
        with wb.Recorder(
            folder, loop.model, loop.optimizer, context={"micro_batches": 3}, gradients="full"
        ) as recorder:
            for part, factor in zip(DATA.chunk(3), (1.0, -4.0, 3.0), strict=True):
                kept = [parameter.grad for parameter in parameters]
                if pieces == "each":
                    loop.optimizer.zero_grad()
                (factor * loop.model(part).sum()).backward()
                if pieces:
                    own_clip(loop.optimizer, 1.0)
                if pieces == "each" and kept[0] is not None:
                    for parameter, before in zip(parameters, kept, strict=True):
                        parameter.grad += before
            recorder.take_gradients(max_norm=1.0)
            loop.optimizer.step()
        return folder

    right, wrong = clipped_in_pieces(tmp_path / "right", ""), clipped_in_pieces(tmp_path / "wrong", pieces)
    diagnosis = wb.diagnose(right, wrong)
    assert diagnosis.causes[0].name == "gradient_clipping", str(diagnosis)
    assert diagnosis.causes[0].score == 0.85


def own_clip(optimizer, bound, each=False):
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    whole = torch.cat([parameter.grad.flatten() for parameter in parameters]).norm()
    for parameter in parameters:
        parameter.grad.mul_((bound / (parameter.grad.norm() if each else whole)).clamp_max(1.0))


class OwnClip(Loop):
    """A loop that clips by its own code, behind gradients that were taken."""

    def run(self, steps=3, rule=lambda optimizer: None):
        with wb.Recorder(self.folder, self.model, self.optimizer) as recorder:
            for _ in range(steps):
                self.optimizer.zero_grad()
                self.model(DATA).square().mean().backward()
                recorder.take_gradients()
                rule(self.optimizer)
                self.optimizer.step()
        return self.folder


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda optimizer: own_clip(optimizer, 0.2, each=True), "in the trusted run all by "),
        (lambda optimizer: own_clip(optimizer, 0.1), "clipped to 0.1, in the trusted run clipped to 0.2"),
        (lambda optimizer: None, "in the trusted run clipped to 0.2"),
    ],
)
def test_another_rule_of_a_loops_own_clip_is_seen_behind_gradients_that_were_taken(wrong, reason, tmp_path):
    right = OwnClip(tmp_path / "right").run(rule=lambda optimizer: own_clip(optimizer, 0.2))
    diagnosis = wb.diagnose(right, OwnClip(tmp_path / "wrong").run(rule=wrong))
    assert diagnosis.causes[0].name == "gradient_clipping", str(diagnosis)
    assert reason in diagnosis.causes[0].evidence[0]


def test_one_rule_gives_gradients_of_other_lengths_other_factors_and_is_no_cause(tmp_path):
    rule = {"rule": lambda optimizer: own_clip(optimizer, 0.1)}
    right = OwnClip(tmp_path / "right").run(**rule)
    for number, other in enumerate(({"seed": 1}, {"dropout": 0.5})):
        diagnosis = wb.diagnose(right, OwnClip(tmp_path / f"wrong{number}", **other).run(**rule))
        assert "gradient_clipping" not in {cause.name for cause in diagnosis.causes}, str(diagnosis)


def test_a_momentum_that_is_cleared_between_steps(tmp_path):
    def lost(optimizer):
        optimizer.step()
        for kept in optimizer.state.values():
            kept["momentum_buffer"].zero_()

    sgd = {"kind": torch.optim.SGD, "momentum": 0.9}
    right, wrong = Loop(tmp_path / "right", **sgd).run(), Loop(tmp_path / "wrong", **sgd).run(update=lost)
    diagnosis = wb.diagnose(right, wrong)
    assert diagnosis.causes[0].name == "optimizer_state", str(diagnosis)
    assert diagnosis.causes[0].evidence == ("before step 1 its state keeps nothing, not momentum_buffer",)


def test_an_update_without_effect(tmp_path):
    def lost(optimizer):
        kept = [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]]
        optimizer.step()
        with torch.no_grad():
            for parameter, before in zip(optimizer.param_groups[0]["params"], kept, strict=True):
                parameter.copy_(before)

    right, wrong = Loop(tmp_path / "right").run(), Loop(tmp_path / "wrong").run(update=lost)
    diagnosis = wb.diagnose(right, wrong)
    assert diagnosis.causes[0].name == "no_update", str(diagnosis)
    assert "the weights of step 1 are those of the step before" in diagnosis.causes[0].evidence[0]


def test_a_setting_that_differs_after_the_numbers_is_no_cause_of_them(tmp_path):
    """The loss of the first step is wrong, and the learning rate of the second."""

    def other_rate(optimizer):
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.02

    class Doubled(Loop):
        def run(self, **options):
            self.model.register_forward_hook(lambda module, given, output: 2 * output)
            return super().run(**options)

    diagnosis = wb.diagnose(Loop(tmp_path / "right").run(), Doubled(tmp_path / "wrong").run(update=other_rate))
    assert diagnosis.causes[0].name != "optimizer_settings"
    assert diagnosis["optimizer_settings"].score == 0.2


def test_autocast_sets_the_precision_of_a_record(tmp_path):
    folder = Loop(tmp_path / "mixed", autocast=True).run()
    assert Record.load(folder).context["precision"] == "bf16_mixed"
    assert Record.load(Loop(tmp_path / "plain").run()).context["precision"] == "float32"


def test_a_saved_record_keeps_what_was_seen(tmp_path):
    record = Record.load(Loop(tmp_path / "first").run())
    again = Record.load(record.save(tmp_path / "again"))
    assert again.steps[1].observed == record.steps[1].observed != {}
    assert again.context["observed"] == record.context["observed"]


@pytest.mark.parametrize(("dp", "accused"), [(2, False), (1, True)])
def test_parts_of_weights_on_another_number_of_ranks_are_not_compared(dp, accused, tmp_path):
    """A record of FSDP has the checksum of rank 0's part, which is another one where there are more ranks."""
    folders = [Loop(tmp_path / name).run() for name in ("right", "wrong")]
    for folder, ranks, checksum in zip(folders, (1, dp), ("a" * 16, "b" * 16), strict=True):
        path = folder / "record.json"
        record = json.loads(path.read_text())
        record["context"]["dp"] = ranks
        record["context"]["observed"] |= {"sharded": True, "weights": checksum}
        path.write_text(json.dumps({name: value for name, value in record.items() if name != "crc32"}))
    causes = [cause.name for cause in wb.diagnose(*folders).causes]
    assert ("initial_weights" in causes) == accused


@pytest.mark.parametrize(("after", "named"), [(1, True), (2, False)])
def test_clipping_after_some_backwards_is_another_clipping(after, named, tmp_path):
    """Micro-batches that are clipped one by one, where the trusted run clips their sum."""
    for folder, at in (("right", 2), ("wrong", after)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with wb.Recorder(tmp_path / folder, model, optimizer, gradients="full"):
            for number, part in enumerate(DATA.split(6), 1):
                model(part).square().mean().backward()
                if number >= at:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
    causes = wb.diagnose(tmp_path / "right", tmp_path / "wrong").causes
    assert (causes[0].name == "gradient_clipping" and "after 1 of 2 backwards" in causes[0].evidence[0]) is named


def test_another_rule_of_clipping_is_no_other_setting(tmp_path):
    def by_value(folder, *, value):
        loop = Loop(folder, kind=torch.optim.SGD)
        with wb.Recorder(folder, loop.model, loop.optimizer, gradients="full") as recorder:
            for data in DATA.chunk(2):
                loop.model(data).square().mean().backward()
                recorder.take_gradients()
                parameters = list(loop.model.parameters())
                if value:
                    nn.utils.clip_grad_value_(parameters, 0.01)
                else:
                    nn.utils.clip_grad_norm_(parameters, 0.01)
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        return folder

    diagnosis = wb.diagnose(by_value(tmp_path / "right", value=False), by_value(tmp_path / "wrong", value=True))
    assert diagnosis.causes[0].name == "gradient_clipping", str(diagnosis)
    assert diagnosis["optimizer_settings"].score == 0.7
