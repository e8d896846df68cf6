"""A program that is started warm does what it does when the interpreter starts it."""

import os
import select
import signal
import subprocess
import sys

import pytest

from tests.helpers import warm

WITHIN_S = 60.0
"""For what takes milliseconds; the programs sleep much longer."""

STATE = """
import gc, json, os, signal, sys, threading
print(json.dumps([sys.argv, sys.path[0], os.getcwd(), os.environ["OF_THIS_TEST"], sys.stdin.read(), __name__,
                  signal.getsignal(signal.SIGINT) is signal.default_int_handler, threading.active_count(),
                  gc.isenabled()]))
print("an error", file=sys.stderr)
"""


def both(*arguments, **how):
    """The results of a warm start and of an ordinary one."""
    how = {"capture_output": True, "text": True, "timeout": 240} | how
    return [subprocess.run([*start, *arguments], **how) for start in ([warm.python()], [sys.executable])]


@pytest.mark.parametrize("way", [["-c"], ["-P", "-c"], ["-m"], ["-P"], []], ids=" ".join)
def test_arguments_environment_folder_and_input_are_the_same(way, tmp_path):
    (tmp_path / "program.py").write_text(STATE)
    what = STATE if "-c" in way else "program" if "-m" in way else "program.py"
    environment = os.environ | {"OF_THIS_TEST": "seen"}
    got, expected = both(*way, what, "one", "-m", cwd=tmp_path, env=environment, input="words")
    assert (got.returncode, got.stdout, got.stderr) == (0, expected.stdout, expected.stderr)
    assert "seen" in got.stdout


@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.exit(3)",
        "import sys; sys.exit('a sentence')",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import atexit; atexit.register(print, 'at the end')",
        "import threading; threading.Timer(0.1, print, ['a thread']).start()",
        "import sys; [s.reconfigure(errors='replace') for s in (sys.stdout, sys.stderr)]; print(sys.stdout.errors)",
        "import sys; print(*(str(getattr(s, n)) for s in (sys.stdout, sys.stderr) for n in "
        "('encoding', 'errors', 'line_buffering', 'write_through')))",
    ],
)
def test_it_ends_the_same_way(source):
    got, expected = both("-c", source)
    assert (got.returncode, got.stdout, got.stderr) == (expected.returncode, expected.stdout, expected.stderr)


def test_a_traceback_is_printed():
    got, expected = both("-c", "1 / 0")
    assert got.returncode == expected.returncode == 1
    assert got.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_files_keep_their_numbers():
    read, write = os.pipe()
    with os.fdopen(read) as file:
        subprocess.run([warm.python(), "-c", f"import os; os.write({write}, b'here')"], pass_fds=[write], check=True)
        os.close(write)
        assert file.read() == "here"


def test_a_pipe_ends_when_the_program_closes_it():
    source = "import os, time; print('up', flush=True); os.close(1); time.sleep(900)"
    with subprocess.Popen([warm.python(), "-c", source], stdout=subprocess.PIPE) as process:
        ends = ended(process.stdout)
        process.kill()
    assert ends


def test_libraries_are_loaded_and_the_package_is_not():
    source = "import sys; print(*(n in sys.modules for n in ('torch', 'transformers', 'workbench')))"
    got, expected = both("-c", source)
    assert got.stdout == "True True False\n"
    assert expected.stdout == "False False False\n"


INLINE = "module://matplotlib_inline.backend_inline"


@pytest.mark.parametrize(
    ("environment", "backend"),
    [({"MPLBACKEND": "svg"}, "svg"), ({"JPY_PARENT_PID": "1"}, INLINE)],
    ids=["given", "of a kernel"],
)
def test_drawings_have_the_backend_of_the_environment(environment, backend):
    """A kernel gives it to itself, before anything imports matplotlib."""
    source = (
        "import sys; loaded = 'matplotlib' in sys.modules; import matplotlib as m; print(loaded, m.rcParams['backend'])"
    )
    done = subprocess.run([warm.python(), "-c", source], env=os.environ | environment, capture_output=True, text=True)
    assert done.stdout == f"True {backend}\n"


def test_another_environment_of_a_library_starts_from_nothing():
    source = "import sys; print('torch' in sys.modules)"
    got, _ = both("-c", source, env=os.environ | {"TORCH_LOGS": "+dynamo"})
    assert got.stdout == "False\n"


def test_signals_reach_it():
    source = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print('up', flush=True); time.sleep(99)"
    )
    with subprocess.Popen([warm.python(), "-c", source], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(WITHIN_S) == 7
        finally:
            process.kill()


def test_it_dies_with_the_process_that_stands_for_it():
    source = "import time; print('up', flush=True); time.sleep(900)"
    with subprocess.Popen([warm.python(), "-c", source], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.kill()
        assert select.select([process.stdout], [], [], WITHIN_S)[0], "its output is closed when it has ended"


def ended(stream):
    """True if a stream ends soon after its first line."""
    stream.readline()
    return bool(select.select([stream], [], [], WITHIN_S)[0])
