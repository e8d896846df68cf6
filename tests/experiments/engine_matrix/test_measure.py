"""Rows of the matrix name drivers and environments that exist; a record keeps what was not measured again."""

from pathlib import Path

import pytest

from experiments.engine_matrix import measure as measuring
from experiments.engine_matrix.measure import ENTRIES, FOLDER, main, measure, unexpected
from tests.helpers.toy_engine import ToyEngine
from workbench.atomic import from_json

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("title", ENTRIES)
def test_a_row_has_a_driver_and_an_environment(title):
    entry = ENTRIES[title]
    assert (FOLDER / "drivers" / f"{entry.driver}.py").is_file()
    assert not entry.environment or (ROOT / "engines" / f"{entry.environment}.txt").is_file()


def test_every_system_with_a_trainer_has_a_row():
    others = {"llama_cpp", "drift"}  # a sampler, and losses alone
    systems = {file.stem for file in (ROOT / "engines").glob("*.txt")} - others
    assert {entry.environment for entry in ENTRIES.values()} == {"", *systems}


def test_a_record_is_saved_after_each_engine_with_its_commit(monkeypatch):
    monkeypatch.setattr(measuring, "Script", lambda *_, **__: ToyEngine())
    monkeypatch.setattr(measuring, "versions", lambda entry: "toy 1")
    saved = []
    measure(["FSDP2", "DDP"], save=lambda record: saved.append(list(record["engines"])))
    assert saved == [["FSDP2"], ["DDP", "FSDP2"]]
    monkeypatch.setattr(measuring, "provenance", lambda root: {"git": {"commit": "abc"}})
    assert measure(["DDP"])["engines"]["DDP"]["commit"] == "abc"


def test_an_engine_that_cannot_be_measured_loses_no_other(monkeypatch):
    monkeypatch.setattr(measuring, "Script", lambda *_, **__: ToyEngine())

    def versions(entry):
        if entry.environment == "lightning":
            raise OSError("no environment")
        return "toy 1"

    monkeypatch.setattr(measuring, "versions", versions)
    saved = []
    with pytest.raises(OSError, match="no environment"):
        measure(["Lightning", "DDP"], save=lambda record: saved.append(list(record["engines"])))
    assert saved == [["DDP"]]


def test_rows_that_are_named_are_measured_and_others_are_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "Script", lambda *_, **__: ToyEngine("norm doubled"))
    monkeypatch.setattr(measuring, "versions", lambda entry: "toy 1")
    monkeypatch.setattr(measuring, "FOLDER", tmp_path)
    monkeypatch.setattr(measuring, "RECORD", tmp_path / "matrix.json")
    kept = measure(["FSDP2"])["engines"]["FSDP2"]
    record = measure(["DDP"], kept={"FSDP2": kept})
    assert list(record["engines"]) == ["DDP", "FSDP2"]
    assert unexpected(record["engines"]) == ["DDP: norm_of_update broken", "FSDP2: norm_of_update broken"]
    assert not record["bars"]["as expected"]["holds"]
    assert main(["Lightning"]) == 0
    assert list(from_json((tmp_path / "matrix.json").read_text())["engines"]) == ["Lightning"]
    assert main(["DDP"]) == 0
    assert list(from_json((tmp_path / "matrix.json").read_text())["engines"]) == ["DDP", "Lightning"]
    assert "norm_of_update" in (tmp_path / "report.html").read_text()
