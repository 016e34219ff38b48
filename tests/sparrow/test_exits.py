"""Every documented exit code, met as a user meets it: one line that says what is wrong."""

from __future__ import annotations

import http.server
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from edge_sdk.device import embedding, transport
from edge_sdk.errors import SdkError
from sparrow.command_line.command import Command, WrongUsage, explain
from sparrow.command_line.exits import MEANINGS, Exit, of_status
from sparrow.coordinator.settings import Settings
from sparrow.graphs.skeleton import fill as fill_skeleton
from sparrow.main import COMMANDS
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.manifest import initial_values
from sparrow.protocol.preparation import Preparation
from sparrow.reading import roles
from sparrow.reading.errors import BadOption
from sparrow.reading.options import ReadOptions, Wanted
from sparrow.transport import httpx

from ..coordinator.api.test_contract import serving
from ..disks import fill, small_disk
from .conftest import ADMIN, ENROLMENT, OBSERVER

__all__ = ["small_disk"]  # a fixture

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


@pytest.fixture
def closed():
    """The address of a port on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(scope="module")
def other_server():
    """The address of a server that is no coordinator."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):  # its base class calls it so
            body = b"<html>a printer</html>"
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def calls(tmp_path):
    """Command -> the words that make it call the coordinator at an address, and give up at once."""
    samples = tmp_path / "samples.npz"
    np.savez(samples, inputs=np.zeros((2, 1, 8, 8), np.float32), targets=np.zeros(2, np.int64))

    def words(server, name):
        return {
            "status": ["--server", server],
            "track": ["default", "--server", server, "--json", "--wait", "0"],
            "publish": ["lab", "--server", server, "--wait", "0"],
            "join": [
                "--server",
                server,
                "--device-name",
                "pi",
                "--state-dir",
                tmp_path / "pi",
                "--wait",
                "0",
                "--quiet",
            ],
            "fleet": ["--server", server, "--devices", "2", "--memory", "--processes", "1", "--wait", "0"],
            "evaluate": ["default", "--server", server, "--data", samples],
        }[name]

    return words


CALLERS = ("status", "track", "publish", "join", "fleet", "evaluate")


def test_the_page_has_the_table():
    table = dict(re.findall(r"^\| (\d+) \| (.+) \|$", PAGE, re.MULTILINE))
    assert {int(code): text for code, text in table.items()} == {int(code): text for code, text in MEANINGS.items()}
    assert set(MEANINGS) == set(Exit)


# --- 0 and 1 ---------------------------------------------------------------------------------------------------------


def test_done(sparrow):
    code, out, err = sparrow("devices", "--json")
    assert (code, err) == (Exit.DONE, "")
    assert json.loads(out)["board"]


def raising(error):
    def run(options):
        raise error

    return Command("some.module", "For this test.", lambda parser: None, run, {SdkError: Exit.FAILED})


def test_an_error_with_a_code_is_one_line_and_a_bug_shows_its_traceback(capsys, monkeypatch):
    assert raising(SdkError("the one thing\n  and the other")).main([]) == Exit.FAILED
    assert capsys.readouterr().err == "some.module: the one thing and the other\n"
    assert raising(KeyError("x")).main([], "sparrow thing") == Exit.FAILED
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "Traceback (most recent call last):"
    assert last == "sparrow thing: KeyError: 'x'; this is a bug: please report it with the lines above"
    assert raising(PermissionError(13, "Permission denied", "/etc/shadow")).main([]) == Exit.FAILED
    assert capsys.readouterr().err == "some.module: /etc/shadow: Permission denied\n"
    for arguments, variable in ((["--traceback"], "0"), ([], "1")):
        monkeypatch.setenv("SPARROW_TRACEBACK", variable)
        assert raising(SdkError("one thing")).main(arguments) == Exit.FAILED
        first, *_, last = capsys.readouterr().err.splitlines()
        assert first == "Traceback (most recent call last):"
        assert last == "some.module: one thing"


def test_a_port_that_is_taken_is_no_place_to_serve(fails, tmp_path, monkeypatch):
    monkeypatch.setenv("COORDINATOR_DATA_DIR", str(tmp_path / "data"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = fails(Exit.FAILED, "serve", "--port", port)
    assert f"127.0.0.1:{port} " in line
    assert not (tmp_path / "data").exists()


# --- 2 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_that_there_is_not_is_wrong_usage(name, sparrow):
    code, out, err = sparrow(name, "--no-such-option")
    assert (code, out) == (Exit.USAGE, "")
    (line,) = err.splitlines()
    assert line.startswith(f"sparrow {name}")
    assert line.endswith("--help")


def test_so_is_a_command_that_there_is_not(sparrow):
    code, out, err = sparrow("dance")
    assert (code, out) == (Exit.USAGE, "")
    (line,) = err.splitlines()
    assert "'dance'" in line


@pytest.mark.parametrize("name", CALLERS)
@pytest.mark.parametrize("server", ["127.0.0.1:8000", "http://", "http://host:port"])
def test_so_is_an_address_that_is_none(fails, calls, name, server):
    line = fails(Exit.USAGE, name, *calls(server, name))
    assert server in line
    assert "http://HOST:PORT or https://HOST" in line


def test_so_is_an_address_in_the_place_of_a_federation(sparrow):
    for name in ("status", "track", "publish"):
        code, _, err = sparrow(name, "http://lab.example:8000", "default")
        assert (code, len(err.splitlines())) == (Exit.USAGE, 1)
        assert "--server http://lab.example:8000" in err


@pytest.mark.parametrize("option", ["labl=state", "label=staet", "drop=hete", "categories=hete", "time=hete,window=2s"])
def test_so_is_an_option_of_the_data_that_is_none(fails, tmp_path, option):
    table = tmp_path / "north.csv"
    table.write_text("heat,state\n1,on\n2,off\n,on\n")
    assert option.partition("=")[0] in fails(Exit.USAGE, "data", "check", f"{table},{option}")


def test_so_are_labels_without_a_name_and_a_column_of_the_federation_that_is_not_there(fails, tmp_path):
    table = tmp_path / "north.csv"
    table.write_text("heat,state\n1,on\n2,off\n,on\n")
    assert "label=NAME" in fails(Exit.USAGE, "data", "check", table)
    preparation = Preparation.model_validate(
        {"reader": "rows", "dtype": "float32", "shape": [1], "columns": [{"name": "load"}]}
    )
    with pytest.raises(BadOption, match="no column load") as missing:
        roles.assign("north.csv", ["heat", "state"], ReadOptions(label="state"), Wanted(preparation))
    assert missing.value.exit_code is Exit.USAGE


def test_a_missing_value_is_a_fault_of_the_data(fails, tmp_path):
    table = tmp_path / "north.csv"
    table.write_text("heat,state\n1,on\n2,\n3,on\n")
    assert "line 3" in fails(Exit.FAILED, "data", "check", f"{table},label=state")


def test_so_is_a_database_of_another_kind(fails, monkeypatch):
    monkeypatch.setenv("COORDINATOR_DATABASE_URL", "mysql://me:secret@localhost/sparrow")
    assert "secret" not in fails(Exit.USAGE, "token", "list", "--records")


@pytest.mark.parametrize("name", ["serve", "token"])
def test_so_is_a_setting_that_cannot_be(fails, monkeypatch, name):
    monkeypatch.setenv("COORDINATOR_TICK_SECONDS", "often")
    line = fails(Exit.USAGE, name, *(["list", "--records"] if name == "token" else []))
    assert "COORDINATOR_TICK_SECONDS: often" in line
    monkeypatch.delenv("COORDINATOR_TICK_SECONDS")
    for text, said in (
        ("{", "give a JSON object"),
        ('{"ruonds": 3}', "ruonds: there is no such setting (did you mean"),
    ):
        monkeypatch.setenv("COORDINATOR_DEFAULT_SETTINGS", text)
        assert said in fails(Exit.USAGE, name, *(["list", "--records"] if name == "token" else []))


def test_so_is_a_port_that_there_is_not(fails, tmp_path, monkeypatch):
    monkeypatch.setenv("COORDINATOR_DATA_DIR", str(tmp_path))
    line = fails(Exit.USAGE, "serve", "--port", "80000")
    assert line == "sparrow serve: --port 80000: not a port; choose one from 1 to 65535, or 0 for any"
    assert "80000" in fails(Exit.USAGE, "status", "--server", "http://127.0.0.1:80000")


def test_so_is_a_part_of_the_data_that_there_is_not(fails, guarded, calls, monkeypatch):
    monkeypatch.setenv("SPARROW_ENROLMENT_TOKEN", ENROLMENT)
    line = fails(Exit.USAGE, "join", *calls(guarded, "join"), "--data", "index=7,of=2")
    assert "index=7 of 2 parts; choose 0 to 1" in line
    line = fails(Exit.USAGE, "join", *calls(guarded, "join"), "--data", "partition=dirichlett")
    assert "did you mean dirichlet?" in line


def test_so_is_a_setting_that_the_coordinator_refuses(fails, guarded, calls, monkeypatch):
    monkeypatch.setenv("SPARROW_ADMIN_TOKEN", ADMIN)
    line = fails(Exit.USAGE, "publish", *calls(guarded, "publish"), "foo=3")
    assert "method_settings.foo" in line
    line = fails(Exit.USAGE, "publish", *calls(guarded, "publish"), "roundz=3")
    assert "did you mean rounds?" in line
    assert "twice" in fails(Exit.USAGE, "publish", *calls(guarded, "publish"), "rounds=3", "rounds=4")


def test_so_is_a_misspelt_setting_or_option(fails, sparrow, monkeypatch):
    monkeypatch.setenv("COORDINATOR_DEFUALT_TASK", "")
    line = fails(Exit.USAGE, "serve")
    assert "did you mean COORDINATOR_DEFAULT_TASK?" in line
    assert "did you mean --wait?" in sparrow("publish", "x", "--waiit", "3")[2]
    assert "did you mean join?" in sparrow("jion")[2]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("federation lst", "list"),
        ("federation list --sever x", "--server"),
        ("federation set lab --wiat 3 rounds=2", "--wait"),
        ("device shwo lab pi", "show"),
        ("model downlaod lab", "download"),
        ("token create admn", "admin"),
        ("token revok x", "revoke"),
        ("join --accelerator gpu", "cpu"),
        ("join --name pi", "--device-name"),
        ("fleet --devices 2 --engine onxn", "onnx"),
        ("export state --outptu m.onnx", "--output"),  # though --output is required and missing
        ("bench runn", "run"),
        ("completion bsh", "bash"),
    ],
)
def test_the_nearest_word_is_told_within_every_command(sparrow, words, meant):
    code, out, err = sparrow(*words.split())
    assert (code, out, len(err.splitlines())) == (Exit.USAGE, "", 1)
    assert f"(did you mean {meant}?)" in err


def test_the_nearest_limit_of_a_policy_and_part_of_data_are_told(fails, guarded, calls, monkeypatch):
    words = calls(guarded, "join")
    assert "(did you mean pause_celsius?)" in fails(Exit.USAGE, "join", *words, "--limit", "pause_celsus=60")
    assert "pause_celsius: hot" in fails(Exit.USAGE, "join", *words, "--limit", "pause_celsius=hot")
    monkeypatch.setenv("SPARROW_ENROLMENT_TOKEN", ENROLMENT)
    assert "(did you mean index?)" in fails(Exit.USAGE, "join", *words, "--data", "idnex=0,of=2")


# --- 3 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lacks", "extra"),
    [
        ("serve", "uvicorn", "[coordinator]"),
        ("completion", "shtab", "[completion]"),
        ("status", "segno", ""),
        ("track", "pydantic", ""),
    ],
)
def test_a_part_that_is_not_installed_is_named_with_its_extra(fails, monkeypatch, name, lacks, extra):
    for module in (COMMANDS[name].module, "edge_sdk.device.transport"):  # as if nothing had been imported yet
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, lacks, None)  # what import makes of a package that is not there
    assert f"pip install 'sparrow-fl{extra}'" in fails(Exit.CANNOT, name, "--help")


@pytest.mark.parametrize("name", [name for name, source in COMMANDS.items() if source.trains and source.torch])
def test_a_device_without_torch_cannot_train(fails, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "PyTorch is not installed" in fails(Exit.CANNOT, name)


def test_a_device_without_torch_joins_unless_it_asks_for_it(fails, closed, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    where = ["join", "--server", closed, "--wait", "0", "--quiet"]
    assert "does not answer" in fails(Exit.UNREACHABLE, *where)
    for asked in (["--engine", "torch"], ["--bfloat16"]):
        assert "because PyTorch is not installed" in fails(Exit.CANNOT, *where, *asked)


def test_a_budget_that_does_not_fit_is_more_than_this_machine_can(fails, guarded, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARROW_ENROLMENT_TOKEN", ENROLMENT)
    where = ["--server", guarded, "--device-name", "small", "--state-dir", tmp_path / "small", "--data", "index=0,of=2"]
    assert "MiB" in fails(
        Exit.CANNOT, "join", *where, "--budget", "1", "--memory-limit", "1", "--quiet", "--engine", "torch"
    )


# --- 4 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLERS)
def test_the_default_server_is_that_of_the_environment(fails, calls, closed, name, monkeypatch):
    monkeypatch.setenv("SPARROW_SERVER", closed)
    words = calls(closed, name)
    place = words.index("--server")
    line = fails(Exit.UNREACHABLE, name, *words[:place], *words[place + 2 :])
    assert closed in line


@pytest.mark.parametrize("name", CALLERS)
def test_a_coordinator_that_is_down_does_not_answer(fails, calls, closed, name):
    line = fails(Exit.UNREACHABLE, name, *calls(closed, name))
    assert closed in line
    assert "does not answer" in line


def test_a_database_that_is_down_does_not_answer_either(fails, closed, monkeypatch):
    pytest.importorskip("psycopg")
    where = closed.removeprefix("http://")
    monkeypatch.setenv("COORDINATOR_DATABASE_URL", f"postgresql://me:secret@{where}/sparrow")
    line = fails(Exit.UNREACHABLE, "token", "list", "--records")
    assert "the database failed: " in line


@pytest.mark.parametrize("name", ["status", "track", "publish", "evaluate"])
def test_what_answers_may_be_no_coordinator(fails, calls, other_server, name):
    assert "coordinator" in fails(Exit.UNREACHABLE, name, *calls(other_server, name))


# --- 5 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLERS)
def test_a_token_that_is_wrong_is_refused(fails, calls, guarded, name, monkeypatch):
    for kind in ("ADMIN", "OBSERVER", "ENROLMENT"):
        monkeypatch.setenv(f"SPARROW_{kind}_TOKEN", "another")
    assert "token" in fails(Exit.REFUSED, name, *calls(guarded, name))


# --- 6 ---------------------------------------------------------------------------------------------------------------


def test_a_federation_that_there_is_not(fails, guarded, monkeypatch):
    monkeypatch.setenv("SPARROW_OBSERVER_TOKEN", OBSERVER)
    assert "there is no federation 'none'" in fails(Exit.NOT_FOUND, "status", "none", "--server", guarded)
    assert "there is no federation 'none'" in fails(Exit.NOT_FOUND, "track", "none", "--server", guarded, "--json")


def test_the_nearest_federation_is_told_by_every_command_that_calls(fails, guarded, calls, monkeypatch):
    monkeypatch.setenv("SPARROW_ADMIN_TOKEN", ADMIN)
    monkeypatch.setenv("SPARROW_OBSERVER_TOKEN", OBSERVER)
    for name in ("status", "track", "evaluate"):
        words = ["defualt", *(word for word in calls(guarded, name) if word != "default")]
        assert "(did you mean default?)" in fails(Exit.NOT_FOUND, name, *words)
    assert "did you mean digits?" in fails(
        Exit.NOT_FOUND, "federation", "create", "new", "--task", "digts", "--server", guarded
    )


def test_a_misspelt_method_task_or_experiment_is_told_with_the_nearest(fails, guarded, calls, monkeypatch):
    monkeypatch.setenv("SPARROW_ADMIN_TOKEN", ADMIN)
    words = calls(guarded, "publish")
    line = fails(Exit.NOT_FOUND, "publish", *words, "method=fedspuu")
    assert "did you mean fedspu?" in line
    assert "did you mean digits?" in fails(Exit.NOT_FOUND, "publish", *words, "--task", "digit")
    assert "did you mean fedsgc-mnist?" in fails(Exit.NOT_FOUND, "bench", "run", "fedsg-mnist", "--data", "x")


@pytest.mark.parametrize(
    "words",
    [
        ["predict", "none.onnx", "--input", "none.npy"],
        ["export", "none", "--output", "m.onnx", "--quiet"],
        ["devices", "--root", "none"],
        ["evaluate", "default", "--data", "none.npz"],
        ["backup", "copy"],
        ["restore", "none"],
        ["token", "list", "--records"],
        ["profile", "--task", "none"],
        ["profile", "--task", "npz", "--data", "none.npz"],
        ["publish", "lab", "--task", "none"],
        ["serve", "--ssl-certfile", "none.pem"],
    ],
    ids=" ".join,
)
def test_a_file_or_task_that_there_is_not(fails, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fails(Exit.NOT_FOUND, *words)


# --- 7 ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path):
    digits = load_builtin("digits")
    values = initial_values(digits.manifest, 0)
    (tmp_path / "model.onnx").write_bytes(fill_skeleton(digits.skeleton, digits.manifest, values))
    np.save(tmp_path / "samples.npy", np.zeros((2, 1, 8, 8), np.float32))
    return [tmp_path / "model.onnx", "--input", tmp_path / "samples.npy"]


def test_samples_that_are_no_numbers_are_named_and_not_predicted(fails, model, tmp_path):
    samples = np.zeros((8, 1, 8, 8), np.float32)
    samples[3, 0, 1, 2], samples[5, 0, 0, 0] = np.nan, np.inf
    np.save(tmp_path / "samples.npy", samples)
    line = fails(Exit.FAILED, "predict", *model)
    for part in ("samples.npy", "2 samples", "3, 5", "missing=drop"):
        assert part in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_an_output_that_does_not_fit(fails, model):
    line = fails(Exit.FULL, "predict", *model, "--output", "/dev/full")
    assert "/dev/full" in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_result_that_does_not_fit_on_standard_output():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "sparrow", "devices", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, len(done.stderr.splitlines())) == (Exit.FULL, 1), done.stderr
    assert "No space left on device" in done.stderr


def test_a_full_disk_keeps_a_device_from_beginning(fails, guarded, small_disk, monkeypatch):
    fill(small_disk)
    monkeypatch.setenv("SPARROW_ENROLMENT_TOKEN", ENROLMENT)
    where = ["--server", guarded, "--device-name", "full", "--data", "index=0,of=2", "--wait", "0", "--quiet"]
    line = fails(Exit.FULL, "join", *where, "--budget", "1", "--policy", "none", "--state-dir", small_disk / "device")
    assert "free some space" in line


def test_a_full_disk_keeps_the_operator_from_tokens_and_backups(fails, sparrow, small_disk, tmp_path, monkeypatch):
    monkeypatch.setenv("COORDINATOR_DATA_DIR", str(small_disk / "data"))
    with serving(Settings(data_dir=small_disk / "data")):
        pass
    assert sparrow("token", "create", "admin", "--records")[0] == Exit.DONE
    fill(small_disk)
    assert "full" in fails(Exit.FULL, "token", "create", "admin", "--records")
    monkeypatch.setenv("COORDINATOR_DATA_DIR", str(tmp_path / "data"))
    with serving(Settings(data_dir=tmp_path / "data")):
        pass
    fails(Exit.FULL, "backup", small_disk / "copy")


def test_a_coordinator_without_room_says_so_itself(fails, monkeypatch):
    def answer(request):
        return httpx.Response(
            507, json={"type": "urn:sparrow:problem:DiskFull", "detail": "the coordinator's disk is full"}
        )

    monkeypatch.setattr(
        "edge_sdk.publish.connect",
        lambda server, trust: httpx.Client(base_url=server, transport=httpx.MockTransport(answer)),
    )
    line = fails(Exit.FULL, "publish", "lab", "--server", "http://full", "--wait", "0")
    assert "the coordinator's disk is full" in line


# --- 130 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("join", "run the same command to resume"),
        ("fleet", "state was in memory and is lost"),
    ],
)
def test_a_device_that_waits_can_be_interrupted(sparrow, calls, closed, name, says, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(transport.Transport.__init__, "__kwdefaults__", {**KEEP, "sleep": interrupt})
    monkeypatch.setattr(embedding.Stop, "sleep", lambda stop, seconds: interrupt(seconds))
    words = [word for word in calls(closed, name) if word not in ("--wait", "0")]
    code, out, err = sparrow(name, *words)
    assert (code, out) == (Exit.INTERRUPTED, "")
    assert says in err.splitlines()[-1]


LOADING = """
import importlib, os, signal, sys
from sparrow.main import main

def load(module):  # some packages turn what is raised while they are imported into something else
    try:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    except BaseException:
        raise RecursionError
importlib.import_module = load
sys.exit(main(["join"]))
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_a_command_whose_packages_are_still_imported(name):
    command = [sys.executable, "-c", LOADING, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (Exit.INTERRUPTED, "", "sparrow join: interrupted\n")


def test_sigterm_ends_a_command_as_ctrl_c_does(capsys):
    terminated = Command("some.module", "For this test.", lambda parser: None, lambda _: os.kill(os.getpid(), 15))
    assert terminated.main([]) == Exit.INTERRUPTED
    assert capsys.readouterr().err == "some.module: interrupted\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_be_interrupted_while_its_part_is_loaded(fails, monkeypatch, name):
    def interrupt(module):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupt)
    assert fails(Exit.INTERRUPTED, name) == f"sparrow {name}: interrupted"


def test_and_while_it_works(capsys):
    assert raising(KeyboardInterrupt()).main([]) == Exit.INTERRUPTED
    assert capsys.readouterr().err == "some.module: interrupted\n"


KEEP = dict(transport.Transport.__init__.__kwdefaults__ or {})


@pytest.fixture
def serve(tmp_path):
    """Starts ``sparrow serve`` over one data folder; ended with the test."""
    started = []

    def start(*words):
        settings = {"COORDINATOR_DATA_DIR": str(tmp_path / "data")}
        command = [sys.executable, "-m", "sparrow", "serve", "--port", "0", *words]
        process = subprocess.Popen(command, env={**os.environ, **settings}, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        with process:
            process.kill()


@pytest.mark.integration
def test_a_coordinator_resumes_after_ctrl_c_and_excludes_a_second_one(serve, tmp_path):
    first = serve()
    said = []
    while not (said and "this machine" in said[-1]):
        said.append(first.stderr.readline())
    assert f"data folder: {tmp_path / 'data'}\n" in "".join(said)
    (address,) = re.findall(r"page: (http://127\.0\.0\.1:\d+)/\n", "".join(said))
    assert f"devices join with: sparrow join --server {address}\n" in "".join(said)
    assert not (tmp_path / "data" / "tokens.sh").exists()
    assert httpx.get(f"{address}/v1/federations", timeout=60).json()[0]["name"] == "default"
    _, err = serve().communicate(timeout=60)
    assert err.splitlines()[-1].startswith("sparrow serve: another coordinator")
    assert "Traceback" not in err
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=60)
    assert first.returncode == Exit.INTERRUPTED
    assert err.splitlines()[-1] == "sparrow serve: stopped; run the same command to continue"
    assert "Traceback" not in err


def until(process, words):
    """Return what a process says on stderr up to a line with these words."""
    said, line = "", ""
    while words not in line:
        line = process.stderr.readline()
        said += line
        assert line, said
    return said


@pytest.mark.integration
def test_on_a_network_it_makes_tokens_once_and_tells_how_to_join(serve, sparrow, tmp_path, monkeypatch):
    first = serve("--host", "0.0.0.0")
    said = until(first, "startup complete")
    file = tmp_path / "data" / "tokens.sh"
    assert f"kept in {file} and shown only now" in said
    assert file.stat().st_mode & 0o777 == 0o600
    kept = dict(line.removeprefix("export ").split("=") for line in file.read_text().splitlines())
    (token, port) = re.findall(r"SPARROW_ENROLMENT_TOKEN=(\S+) sparrow join --server http://\S+:(\d+)\n", said)[0]
    assert token == kept["SPARROW_ENROLMENT_TOKEN"]
    assert f"    {kept['SPARROW_ADMIN_TOKEN']}\n" in said
    server = f"http://127.0.0.1:{port}"
    assert "OPEN TO THE NETWORK" not in said
    assert httpx.get(f"{server}/v1/federations").status_code == 401
    device = {"name": "pi", "enrolment_key": "k" * 32}
    where = f"{server}/v1/federations/default/devices"
    assert httpx.post(where, json=device).status_code == 401
    assert httpx.post(where, json=device, headers={"Authorization": f"Bearer {token}"}).status_code == 201
    assert sparrow("status", "--server", server)[0] == Exit.REFUSED
    for name, secret in kept.items():
        monkeypatch.setenv(name, secret)
    assert sparrow("status", "--server", server)[0] == Exit.DONE
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)

    again = until(second := serve("--host", "0.0.0.0"), "startup complete")
    assert f"tokens: {file}\n" in again
    assert not any(secret in again for secret in kept.values())
    (port,) = re.findall(r"page: http://\S+:(\d+)/\n", again)
    assert sparrow("status", "--server", f"http://127.0.0.1:{port}")[0] == Exit.DONE
    second.send_signal(signal.SIGINT)
    second.communicate(timeout=60)


# --- how they are found ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code"),
    [(401, 5), (403, 5), (404, 6), (409, 1), (410, 6), (422, 2), (429, 4), (500, 4), (503, 4), (507, 7)],
)
def test_statuses_of_http(status, code):
    assert of_status(status) == code


def test_a_full_disk_is_found_beneath_what_was_made_of_it():
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise SdkError("the state cannot be written") from None
    except SdkError as error:
        code, text = explain(error)
    assert (code, text) == (
        Exit.FULL,
        "the state cannot be written; free some space and run the command again",
    )


def test_tokens_through_the_one_command(sparrow, tmp_path, monkeypatch):
    monkeypatch.setenv("COORDINATOR_DATA_DIR", str(tmp_path / "data"))
    with serving(Settings(data_dir=tmp_path / "data", default_task="")):
        pass
    made = json.loads(sparrow("token", "create", "enrolment", "--uses", "2", "--records", "--json")[1])
    assert made["secret"].startswith("sparrow_enrol_")
    (listed,) = json.loads(sparrow("token", "list", "--records", "--json")[1])
    assert (listed["id"], listed["status"]) == (made["id"], "valid")
    assert json.loads(sparrow("token", "revoke", made["id"], "--yes", "--records", "--json")[1]) == {
        "revoked": [made["id"]]
    }
    assert sparrow("token", "revoke", "nobody", "--yes", "--records")[0] == Exit.NOT_FOUND


def test_a_federation_is_published_and_told_as_json(sparrow, guarded, monkeypatch):
    monkeypatch.setenv("SPARROW_ADMIN_TOKEN", ADMIN)
    code, out, _ = sparrow("publish", "told", "--server", guarded, "rounds=7", "--json")
    assert code == Exit.DONE
    assert json.loads(out)["settings"]["rounds"] == 7
    assert "a federation called 'told' exists" in sparrow("publish", "told", "--server", guarded)[2]


def test_wrong_usage_and_the_operating_system_have_codes_as_well():
    assert explain(WrongUsage("--a and --b")) == (Exit.USAGE, "--a and --b")
    assert explain(FileNotFoundError(2, "No such file or directory", "x")) == (
        Exit.NOT_FOUND,
        "x: No such file or directory",
    )
