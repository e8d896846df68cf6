"""Dumps that ROLL 8eb27cc2 wrote agree with their settings; other settings are named (`tests/dumps/roll/write.py`)."""

import contextlib
import pickle
from pathlib import Path

import pytest
import torch

from workbench.check import check_step
from workbench.dumps.tensordicts import DataProto
from workbench.errors import RecordError
from workbench.rollouts.torch_files import read_restricted
from workbench.systems.roll.dump import KNOWN, read_dump

DUMPS = Path(__file__).parents[3] / "dumps/roll"
SETTINGS = {
    "token_mean": {"loss_agg_mode": "token-mean", "use_kl_loss": True, "kl_loss_coef": 0.05},
    "seq_mean": {"importance_sampling": "seq", "use_pg_clip_range": True, "pg_clip_low": 0.03, "pg_clip_high": 0.05},
}


def file_of(name):
    return DUMPS / f"mock/{name}/step_000003.pkl"


def check(name, **settings):
    return check_step(file_of(name), system="roll", settings={**SETTINGS[name], **settings})


@pytest.mark.parametrize("name", SETTINGS)
def test_what_roll_wrote_agrees(name):
    result = check(name)
    assert result.ok, str(result)
    agreeing = {stage.name for stage in result.stages if stage.status == "agrees"}
    assert agreeing == {"coefficients", "loss"} | ({"metrics"} if name == "token_mean" else set())


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("token_mean", {"loss_agg_mode": "seq-mean-token-mean"}, "by all trained tokens of the step"),
        pytest.param("token_mean", {"use_kl_loss": False}, "", marks=pytest.mark.slow),
        pytest.param("seq_mean", {"rl_loss_coef": 2.0}, "times 0.5", marks=pytest.mark.slow),
        pytest.param("seq_mean", {"importance_sampling": "token"}, "", marks=pytest.mark.slow),
    ],
)
def test_other_settings_than_roll_had_are_named(name, settings, text):
    result = check(name, **settings)
    assert result.first.name == "coefficients"
    assert text in " ".join(cause.description for cause in result.causes), str(result)


def test_values_have_their_names():
    dump = read_dump(file_of("token_mean"))
    assert torch.bincount(dump.document_ids_T).tolist() == [6, 3, 5, 4, 2, 7]  # no prompt, no padding
    assert dump.loss_mask_T.sum() == 25
    assert dump.documents["group_ids"].tolist() == [0, 0, 0, 1, 1, 1]
    assert {"policy_logprobs", "old_logprobs", "sampler_logprobs", "ref_logprobs", "coefficients"} <= {*dump.tokens}
    assert {*dump.losses} == {"policy", "total", "kl_without_coefficient"}
    batch = read_restricted(file_of("token_mean"), known=KNOWN).batch
    for number in (0, 5):
        own_C = batch["response_mask"][number].bool()
        assert torch.equal(dump.tokens["token_ids"][dump.document_ids_T == number], batch["input_ids"][number][own_C])


def test_a_rollout_has_no_advantages_and_generations_are_text():
    dump = read_dump(file_of("rollout"))
    assert dump.advantages_T is None
    assert "compute_advantage" in dump.notes[1]
    assert check_step(dump, settings={}).verdict == "vacuous"
    text = read_dump(DUMPS / "generations/rollout_dump_data.step_3.jsonl")
    assert text.documents["rewards"].tolist() == [1.0, 0.0, 0.5, 0.0, 1.0, 0.25]
    assert text.documents["group_ids"].tolist() == [0, 0, 0, 1, 1, 1]


def rewritten(monkeypatch, tensors):
    content = read_restricted(file_of("token_mean"), known=KNOWN)
    batch = {name: value for name, value in {**content.batch, **tensors}.items() if value is not None}
    monkeypatch.setattr("workbench.systems.roll.dump.read_restricted", lambda *_, **__: DataProto(batch, {}, {}))
    return read_dump(Path("step.pkl"))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"response_mask": None}, "no response_mask in"),
        ({"input_ids": torch.ones(6, 3)}, r"input_ids \[6, 3\]"),
        ({"advantages": torch.ones(6, 11)}, r"advantages \[6, 11\]"),
        ({"advantages": torch.ones(5, 10)}, r"advantages \[5, 10\]"),
        ({"attention_mask": torch.ones(6, 3)}, r"attention_mask \[6, 3\]"),
        ({"prompt_id": torch.ones(5)}, "5 prompt_id of 6 rows"),
    ],
)
def test_a_batch_that_disagrees_with_itself_is_refused(monkeypatch, tensors, message):
    with pytest.raises(RecordError, match=message):
        rewritten(monkeypatch, tensors)


@pytest.mark.parametrize("place", range(20, 8600, 811))
def test_a_damaged_or_truncated_file_is_read_or_refused(tmp_path, place):
    content, file = bytearray(file_of("token_mean").read_bytes()), tmp_path / "step.pkl"
    file.write_bytes(content[:place])
    with pytest.raises(RecordError):
        read_dump(file)
    content[place] ^= 0xFF
    file.write_bytes(content)
    with contextlib.suppress(RecordError):
        read_dump(file)


class Call:
    def __reduce__(self):
        return print, ("called",)


@pytest.mark.parametrize("thing", [Call(), [1], {"a": 1}])
def test_another_pickle_is_refused_and_nothing_is_called(tmp_path, thing, capsys):
    (tmp_path / "step.pkl").write_bytes(pickle.dumps(thing))
    with pytest.raises(RecordError, match=r"builtins.print|a list|a dict"):
        read_dump(tmp_path / "step.pkl")
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ["a"]}', "line 1 with prompt"),
        ('{"prompt": ["a"], "scores": [1, 2]}', "columns of one length"),
        ("[1]", "line 1: a list"),
    ],
)
def test_other_generations_are_refused(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(RecordError, match=message):
        read_dump(tmp_path / "a.jsonl")
