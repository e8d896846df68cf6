"""Files of the agents of several nodes are read together, in the order in which they were written."""

from __future__ import annotations

import os

from workbench.records.agents import files_of_agents, of_agent, read_of_agents
from workbench.records.failures import EXIT_CODES


def test_the_last_written_comes_last_and_damage_is_left_out(tmp_path):
    (tmp_path / "ranks").mkdir()
    for node, (content, at) in enumerate([('{"0": 1}', 30), ('{"1": -9}', 10), ("{", 20), ("[1]", 40)]):
        path = tmp_path / of_agent(EXIT_CODES, node)
        path.write_text(content)
        os.utime(path, (at, at))
    names = [path.name for path in files_of_agents(tmp_path, EXIT_CODES)]
    assert names == ["exit_codes.node1.json", "exit_codes.node2.json", "exit_codes.json", "exit_codes.node3.json"]
    assert read_of_agents(tmp_path, EXIT_CODES) == [{"1": -9}, {"0": 1}]
    assert read_of_agents(tmp_path / "nowhere", EXIT_CODES) == []
