"""The verbs `rollouts import` and `rollouts check`, through the functions the command line is made of."""

import json

import numpy as np
import pytest

from tests.helpers.vacuous_rollouts import rollouts
from tests.unit.rollouts.test_engine_client import served
from tests.unit.rollouts.test_engine_responses import PROMPT, VLLM, response
from workbench.cli import main
from workbench.cli.rollouts import check, import_
from workbench.errors import RecordError, SpecError
from workbench.rollouts import files
from workbench.rollouts.importers import load_rollouts
from workbench.rollouts.sampling import Sampling

RECORD = {"prompt_tokens": [5, 6], "completion_tokens": [10, 11], "advantage": 0.5, "old_logprobs": [-1.0, -3.0]}
ARRAYS = {
    "prompt_ids": [[5, 6]],
    "prompt_mask": [[1, 1]],
    "completion_ids": [[10, 11]],
    "completion_mask": [[1, 1]],
    "advantages": [0.5],
    "old_per_token_logps": [[-1.0, -3.0]],
}


def test_jsonl_becomes_a_rollout_dataset(tmp_path, capsys):
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(RECORD | {"reward": r, "group_id": "p"}) + "\n" for r in (1.0, 0.0)))
    import_(source, tmp_path / "out", temperature=0.6)
    batch = files.load(tmp_path / "out")
    assert batch.temperature == 0.6
    assert batch.tokens_T.tolist() == [5, 6, 10, 11] * 2
    shown = capsys.readouterr().out
    assert "RolloutBatch(2 documents, 4 to 4 tokens each; 8 tokens, 4 of them trained)" in shown
    (line,) = [line.split() for line in shown.splitlines() if line.startswith("old_logprobs_T")]
    assert line == ["old_logprobs_T", "nats", "trained", "tokens", "-3", "-2", "-1"]
    assert "rewards: 1 of 0, 1 of 1" in shown
    assert "1 groups have different rewards" in shown


def test_an_import_states_what_the_log_probabilities_are(tmp_path, capsys):
    source, output = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text(json.dumps(RECORD | {"support_ids": [[10, 8], [11]]}))
    flags = ["--top-p", "0.9", "--sampler-mode", "processed_logprobs", "--trainer-mode", "truncated"]
    assert main(["rollouts", "import", str(source), str(output), *flags]) == 0
    assert files.load(output).sampling == Sampling(
        top_p=0.9, sampler_logprobs="truncated", trainer_logprobs="truncated"
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert "sampling: top_p 0.9, sampler_logprobs truncated, trainer_logprobs truncated" in printed
    assert main(["rollouts", "import", str(source), str(tmp_path / "x"), "--sampler-mode", "raw_logits"]) == 2
    assert "their normalizer is not reported" in " ".join(capsys.readouterr().err.split())


def test_parquet_becomes_a_rollout_dataset(tmp_path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([RECORD]), tmp_path / "a.parquet")
    import_(tmp_path / "a.parquet", tmp_path / "out")
    assert files.load(tmp_path / "out").tokens_T.tolist() == [5, 6, 10, 11]


def test_npz_becomes_a_rollout_dataset_and_other_arrays_must_be_named(tmp_path):
    np.savez(tmp_path / "a.npz", **{k: np.asarray(v) for k, v in ARRAYS.items()}, pixel_values=np.zeros(3))
    with pytest.raises(ValueError, match="unknown keys pixel_values"):
        import_(tmp_path / "a.npz", tmp_path / "out")
    import_(tmp_path / "a.npz", tmp_path / "out", ignore=("pixel_values",))
    assert files.load(tmp_path / "out").tokens_T.tolist() == [5, 6, 10, 11]


def test_other_suffixes_are_refused(tmp_path):
    with pytest.raises(SpecError, match=r"'\.csv'"):
        import_(tmp_path / "a.csv", tmp_path / "out")
    with pytest.raises(SpecError, match="found: a folder"):
        import_(tmp_path, tmp_path / "out")


def test_other_keys_of_a_table_must_be_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(RECORD | {"note": "x"}))
    with pytest.raises(RecordError, match=r"line 1: note\n  found: unknown(?s:.)*--ignore"):
        import_(tmp_path / "a.jsonl", tmp_path / "out")
    import_(tmp_path / "a.jsonl", tmp_path / "out", ignore=("note",))
    assert files.load(tmp_path / "out").num_documents == 1


def test_import_does_not_overwrite_by_accident(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(RECORD))
    import_(tmp_path / "a.jsonl", tmp_path / "out")
    with pytest.raises(RecordError, match="not overwritten by accident"):
        import_(tmp_path / "a.jsonl", tmp_path / "out")
    import_(tmp_path / "a.jsonl", tmp_path / "out", overwrite=True)


def test_check_refuses_a_truncated_rollout_dataset_by_name(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps(RECORD))
    import_(tmp_path / "a.jsonl", tmp_path / "out")
    path = tmp_path / "out" / "rollouts.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    capsys.readouterr()
    with pytest.raises(RecordError, match=r"rollouts\.safetensors\n  found: truncated: 100 bytes"):
        check(tmp_path / "out")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("advantages of zero", "all recorded advantages are zero, and there are no groups with rewards"),
        ("empty loss mask", "no token is trained"),
        ("one token", "no token is trained"),
        ("groups of one", "all recorded advantages are zero, and every group has one document"),
        ("equal rewards", "all recorded advantages are zero, and no group has different rewards"),
    ],
)
def test_check_reports_a_dataset_without_signal(tmp_path, capsys, case, reason):
    files.save(rollouts(case), tmp_path / "out", provenance={})
    assert main(["rollouts", "check", str(tmp_path / "out")]) == 1
    shown = capsys.readouterr().out
    assert f"  vacuous: {reason}" in shown
    assert "warning" not in shown


@pytest.mark.parametrize(
    ("case", "loss", "code", "line"),
    [
        ("advantages of zero", "sft", 0, ""),
        ("empty loss mask", "sft", 1, "  vacuous: no token is trained: the loss mask is empty. "),
        ("groups of one", "dpo", 1, "  refused: 8 of 8 groups are not two trained documents with different rewards"),
        ("advantages of both signs", "dpo", 1, "  refused: a loss on preference pairs needs groups with rewards"),
    ],
)
def test_check_requires_the_fields_of_the_loss(tmp_path, capsys, case, loss, code, line):
    files.save(rollouts(case), tmp_path / "out", provenance={})
    assert main(["rollouts", "check", str(tmp_path / "out"), "--loss", loss]) == code
    shown = capsys.readouterr().out
    assert f"what a run with the loss {loss} could show:" in shown
    assert line in shown
    assert ("vacuous" in shown, "refused" in shown) == (line.startswith("  vacuous"), line.startswith("  refused"))
    assert "warning" not in shown


def test_check_refuses_a_loss_that_is_none(tmp_path, capsys):
    files.save(rollouts("advantages of zero"), tmp_path / "out", provenance={})
    assert main(["rollouts", "check", str(tmp_path / "out"), "--loss", "dpoo"]) == 2
    assert "did you mean 'dpo'?" in capsys.readouterr().err


def test_check_reports_what_can_be_trained(tmp_path, capsys):
    files.save(rollouts("advantages of both signs"), tmp_path / "out", provenance={})
    assert main(["rollouts", "check", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "  trained: 24 of 40 (60.0%) tokens, in 8 of 8 (100.0%) documents\n" in shown
    assert "  recorded advantages: not zero on 8 of 8 (100.0%) documents, 24 of 24 (100.0%) trained tokens" in shown
    assert "vacuous" not in shown
    assert "warning" not in shown


def test_importing_untrainable_rollouts_succeeds_with_a_warning(tmp_path, capsys):
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps(RECORD | {"advantage": 0.0}) + "\n")
    assert main(["rollouts", "import", str(source), str(tmp_path / "out")]) == 0
    assert "vacuous: all recorded advantages are zero" in capsys.readouterr().out


def test_check_lists_absent_fields(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps(RECORD | {"completion_loss_mask": [0, 0]}))
    import_(tmp_path / "a.jsonl", tmp_path / "out")
    shown = capsys.readouterr().out
    assert "no group ids" in shown
    (line,) = [line.split() for line in shown.splitlines() if line.startswith("old_logprobs_T")]
    assert line[-3:] == ["-", "-", "-"]


def test_a_dataset_is_scored_by_an_engine(tmp_path, capsys):
    """A local server with a documented response; tests/engines has a real one."""
    document = {
        "prompt_tokens": PROMPT[:2],
        "completion_tokens": PROMPT[2:],
        "advantage": 0.5,
        "old_logprobs": [-1, -2],
    }
    load_rollouts([document]).save(tmp_path / "recorded")
    with served(response(VLLM, "scored")) as (address, _):
        assert main(["rollouts", "score", str(tmp_path / "recorded"), str(tmp_path / "scored"), address]) == 0
    batch = files.load(tmp_path / "scored")
    assert batch.sampler_logprobs_T.tolist() == [0.0, 0.0, -0.75, -1.25]
    assert batch.sampling.sampler_logprobs == "raw"
    assert "sampler_logprobs raw" in capsys.readouterr().out
