"""`workbench mcp`, called by the SDK's own client over stdio: one server for all tests."""

import json
import os
import shlex
import sys
import threading
from pathlib import Path

import anyio
import pytest
from anyio.from_thread import start_blocking_portal

from tests.helpers import warm
from tests.helpers.hand_records import make_record
from workbench.cli import main
from workbench.cli.mcp import _result, _tool
from workbench.cli.tools import TOOLS, Answer
from workbench.records.directory import RunDirectory
from workbench.specs.run import RunSpec

ROOT = Path(__file__).parents[3]
PRINTS = """
import os
print("printed by a user's file")
os.system("echo printed by a child")


def right(batch, outputs, totals):
    ratio_T = (outputs.policy_logprobs_T - batch.old_logprobs_T).exp()
    return -(ratio_T * batch.advantages_T * batch.loss_mask_T).sum() / totals.tokens
"""


@pytest.fixture(scope="module")
def wire(tmp_path_factory):
    """What the server writes to its stdout."""
    return tmp_path_factory.mktemp("mcp") / "stdout"


@pytest.fixture(scope="module")
def call(wire):
    """A function that calls a tool, or lists them, in one server."""
    from mcp import Client  # here, as every worker imports this file
    from mcp.client.stdio import StdioServerParameters

    serve = shlex.join([warm.python(), "-m", "workbench", "mcp", "--folder", str(ROOT)])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # the SDK passes little of it on
    command = ["-c", f"{serve} | tee {shlex.quote(str(wire))}"]
    server = StdioServerParameters(command="sh", args=command, env=environment)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(Client(server)) as client:

        def call(name="", **arguments):
            return portal.call(client.call_tool, name, arguments) if name else portal.call(client.list_tools)

        yield call


def answer(result):
    assert not result.is_error, result.content[0].text
    assert result.content[0].text
    return result.structured_content


def test_tools_have_descriptions_and_schemas(call):
    tools = {tool.name: tool for tool in call().tools}
    assert list(tools) == [function.__name__ for function in TOOLS]
    assert all(tool.description and not tool.input_schema["additionalProperties"] for tool in tools.values())
    assert "verl" in tools["translate"].input_schema["properties"]["system"]["enum"]
    assert tools["compare"].annotations.read_only_hint
    assert not tools["prove"].annotations.read_only_hint


def test_compare_a_saved_experiment(call):
    read = answer(call("compare", target="experiments/layout_parity"))
    assert read["agrees"] is True
    assert {"equal", "within budget"} < {configuration["verdict"] for configuration in read["configurations"]}


def test_diagnose_two_records(call, tmp_path):
    folders = [str(make_record(scale=scale).save(tmp_path / f"{scale}")) for scale in (1.0, 0.5)]
    read = answer(call("diagnose", trusted=folders[0], suspect=folders[1]))
    assert (read["verdict"], read["causes"][0]["name"]) == ("different", "over_cp")


def test_bisect_two_configurations(call):
    read = answer(call("bisect", a={}, b={"optimizer": {"learning_rate": 0.5}}, steps=1))
    assert (read["verdict"], read["divergence"]["way"]) == ("different", "weights")


def test_translate_one_system_and_two(call):
    assert answer(call("translate", system="verl", settings={}))["loss"]["surrogate"]["dual_clip"] == 3.0
    read = answer(call("translate", system="verl", settings={}, other_system="trl"))
    assert (read["verdict"], read["same_gradient"]) == ("different", False)


def test_status_of_a_run_and_of_all(call, tmp_path):
    run = RunDirectory.create(tmp_path / "runs", "one", RunSpec())
    [read] = answer(call("status", target=str(run.path)))["runs"]
    assert (read["steps_done"], read["steps"]) == (0, RunSpec().steps)
    assert "runs" in answer(call("status"))


def test_a_mistake_is_an_error_of_four_parts(call):
    result = call("translate", system="verl", settings={"clip_ration": 0.2})
    assert result.is_error
    error = result.structured_content["error"]
    assert error["type"] == "SpecError"
    assert all(error[part] for part in ("requested", "found", "rule", "fix"))
    assert "clip_ratio" in result.content[0].text
    assert "Traceback" not in result.content[0].text


@pytest.mark.parametrize(
    ("arguments", "named"), [({"loss": "grpo", "budget": 3}, "budget"), ({"loss": "grpo", "rounds": 0}, "rounds")]
)
def test_arguments_outside_the_schema_are_refused(call, arguments, named):
    result = call("prove", **arguments)
    assert result.is_error
    assert f"\n{named}\n" in result.content[0].text
    assert "Traceback" not in result.content[0].text


def test_stdout_has_the_protocol_only(call, wire, tmp_path):
    (tmp_path / "prints_of_a_test.py").write_text(PRINTS)
    loss = f"{tmp_path / 'prints_of_a_test.py'}:right"
    assert answer(call("prove", loss=loss, engine="sum", invariants=["cp_degree"], rounds=1))["ok"] is True
    lines = wire.read_text().splitlines()
    assert lines
    assert all(json.loads(line)["jsonrpc"] == "2.0" for line in lines)


def test_numbers_that_json_lacks():
    result = _result(lambda: Answer({"factor": float("nan")}, "text"), {})
    assert result.structured_content == {"factor": {"float": "nan"}}


def test_without_the_extra_the_command_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    assert main(["mcp"]) == 2
    assert "pip install 'workbench[mcp]'" in capsys.readouterr().err


def test_a_folder_that_is_not_there(tmp_path, capsys):
    assert main(["mcp", "--folder", str(tmp_path / "nowhere")]) == 2
    assert "name the folder of your project" in capsys.readouterr().err


def test_a_cancelled_call_is_answered_at_once():
    end = threading.Event()

    def slow():
        end.wait(10)
        return Answer({}, "")

    async def cancelled():
        try:
            with anyio.move_on_after(0.1) as scope:
                await _tool(slow)()
            return scope.cancelled_caught and not end.is_set()
        finally:
            end.set()

    assert anyio.run(cancelled)
