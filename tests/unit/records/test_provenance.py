"""Where a run comes from, without what identifies the machine."""

from __future__ import annotations

import json
import socket
import sys

import pytest
import torch

from tests.helpers.stand_in import stand_in
from workbench.records import provenance


class TestProvenance:
    def test_has_versions_and_no_machine_names(self, monkeypatch, tmp_path):
        root = provenance.project_root()
        program, spec = root / ".venv" / "bin" / "workbench", tmp_path / "spec.yaml"
        monkeypatch.setattr(provenance, "sys", stand_in(sys, argv=[str(program), "run", str(spec)]))
        actual = provenance.provenance(root, seed=3)
        assert actual["argv"] == [".venv/bin/workbench", "run", ".../spec.yaml"]
        assert actual["versions"]["torch"] == torch.__version__
        assert actual["seed"] == 3
        text = json.dumps(actual)
        assert str(root) not in text
        assert socket.gethostname() not in (actual["cpu"], actual["system"])

    def test_works_without_git(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        assert provenance.provenance(tmp_path)["git"] == {"commit": "unknown", "dirty": "unknown"}

    def test_text_keeps_only_identifying_path_parts(self, tmp_path):
        text = f"{tmp_path}/data/a.json and /opt/site-packages/torch/nn.py, a/b, and http://host/x/y"
        assert provenance.without_machine_paths(text, tmp_path) == (
            "data/a.json and .../torch/nn.py, a/b, and http://host/x/y"
        )


class TestProjectRoot:
    @pytest.mark.parametrize("place", ["data/mine", "data/arithmetic/rollouts"])
    def test_is_where_a_rollout_dataset_is(self, tmp_path, place):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "manifest.json").write_text("{}")
        assert provenance.project_root(tmp_path) == tmp_path.resolve()

    def test_another_folder_named_data_moves_nothing(self, tmp_path):
        (tmp_path / "data" / "raw").mkdir(parents=True)
        (tmp_path / "data" / "raw" / "train.csv").write_text("")
        assert provenance.project_root(tmp_path) == provenance.project_root()

    def test_is_the_source_tree_elsewhere(self, tmp_path):
        assert (provenance.project_root(tmp_path) / "workbench" / "errors.py").exists()
