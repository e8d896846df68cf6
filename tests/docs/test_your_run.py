"""The script for a new user's own model, loss and batch runs as the guide prints it, and finds the wrong loss."""

import json

from tests.docs.pages import ROOT, blocks
from workbench.policy.decoder import tiny_qwen3

LENGTHS = (2, 3, 5, 8)
"""Of the completions: two ranks get different token counts, so that a division by one's own is wrong."""


def test_the_script_runs_and_finds_the_wrong_loss(tmp_path, monkeypatch, capsys):
    losses, script = blocks((ROOT / "docs/guides/your-run.md").read_text(), "python")
    assert len(script.splitlines()) <= 25
    records = [
        {
            "prompt_ids": [3, 4 + i // 2],
            "completion_ids": [5 + i] + [7] * (length - 1),
            "old_logprobs": [-2.9] * length,
            "reward": i % 2,
            "group_id": f"prompt-{i // 2}",
        }
        for i, length in enumerate(LENGTHS)
    ]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "my_losses.py").write_text(losses)
    tiny_qwen3(19).save_pretrained(tmp_path / "my_model")
    monkeypatch.chdir(tmp_path)
    exec(compile(script, "your-run.md", "exec"), {})
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    verdicts = {words[0]: words[1] for words in shown if len(words) > 1}
    assert [verdicts[name] for name in ("one_rank", "dp2", "cp2", "tp2", "two_micro_batches", "wrong_in_dp2")] == [
        "reference",
        *["equal"] * 4,
        "different",
    ]
    assert (tmp_path / "my_question/report.html").is_file()
