"""`workbench attribute`: text, JSON, page and exit codes."""

import json

from tests.helpers.gaps import records
from workbench.cli import main


def case(folder, **sampler):
    lines = [json.dumps(one) for one in records(temperature=0.7)]
    (folder / "rollouts.jsonl").write_text("\n".join(lines))
    settings = {"trainer": {"model": "tiny-qwen3"}, "sampler": {"rollouts": "rollouts.jsonl", **sampler}}
    (folder / "attribute.yaml").write_text(json.dumps(settings))  # JSON is YAML
    return str(folder)


def test_a_cause_gives_1_and_a_page_and_what_is_stated_0(tmp_path, capsys):
    page = tmp_path / "gap.html"
    assert main(["attribute", case(tmp_path), "--draws", "0", "--page", str(page)]) == 1
    assert "temperature 0.7" in capsys.readouterr().out
    assert "temperature 0.7" in page.read_text()
    assert main(["attribute", case(tmp_path, temperature=0.7), "--draws", "0"]) == 0


def test_the_result_is_json_too(tmp_path, capsys):
    assert main(["attribute", case(tmp_path), "--draws", "0", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "workbench.attribute/1"
    assert answer["result"]["parts"][0]["factor"] == "temperature"


def test_mistakes_give_2_without_a_traceback(tmp_path, capsys):
    assert main(["attribute", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "attribute.yaml" in error
    assert "Traceback" not in error
