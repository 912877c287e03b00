"""`nmoe ui` as its user, as another account of the machine, and as pages in the user's browser."""

import http.client
import json
import os
import re
import signal
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from benchmarks.platform.browser import Page, browser, chromium
from tests.assets.server import LAUNCH, LOCATION, RUN_STATUS, RUNS, Dagster
from tests.assets.small_project import program_of
from tests.planted import Planted
from tests.project import jsonl_source, serving, write_project

pytestmark = pytest.mark.long

SELECTOR = {
    "repositoryLocationName": LOCATION,
    "repositoryName": "__repository__",
    "jobName": "prep",
}
PARAMETERS = {
    "selector": SELECTOR,
    "mode": "default",
    "runConfigData": {},
    "executionMetadata": {
        "tags": [
            {"key": "dagster/asset_partition_range_start", "value": "0000"},
            {"key": "dagster/asset_partition_range_end", "value": "0001"},
        ]
    },
}
JSON = {"Content-Type": "application/json"}
LAUNCH_BY_ADDRESS = (
    f"/graphql?query={quote(LAUNCH)}&variables={quote(json.dumps({'p': PARAMETERS}))}"
)


class Ui:
    """A running `nmoe ui` in a directory that holds a stranger's modules."""

    def __init__(self, directory: Path) -> None:
        rows = [{"text": f"document {i} of few words " * 40} for i in range(20)]
        write_project(directory, [jsonl_source("web", rows)])
        self.planted = Planted(directory)
        self.home = directory / ".dagster"
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        variables = {name: os.environ[name] for name in os.environ if name != "DAGSTER_HOME"}
        self.log = output = directory / "ui.log"
        with open(output, "wb") as log:
            command = [program_of("nmoe"), "ui", "--port", str(self.port), "--config", "run.toml"]
            self.process = subprocess.Popen(
                command, env=variables, cwd=directory, stdout=log, stderr=log
            )
        self.headers: dict[str, str] = {}
        try:
            found = wait(lambda: re.search(r"http://127\S+", output.read_text()))
            self.address = found[0]
            self.token = self.address.partition("?token=")[2]
            wait(self._signs_in)
        except AssertionError as error:
            self.close()
            raise AssertionError(output.read_text()) from error

    def _signs_in(self) -> bool:
        try:
            status, headers, _ = self.ask(f"/?token={self.token}")
            self.headers = {"Cookie": headers.get("Set-Cookie", "").partition(";")[0]}
            return status == 200 and bool(self.query("{version}"))
        except OSError:
            return False

    def ask(
        self, path: str, method: str = "GET", body: str | None = None, **headers: str
    ) -> tuple[int, http.client.HTTPMessage, str]:
        """Status, headers and text of an answer; `_` in the names of headers is a hyphen."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as client:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            client.request(method, path, body, named)
            answer = client.getresponse()
            return answer.status, answer.headers, answer.read().decode()

    def query(self, text: str, **variables: object) -> dict[str, Any]:
        """What the user's page is answered."""
        body = json.dumps({"query": text, "variables": variables})
        own = {"Origin": f"http://127.0.0.1:{self.port}", **JSON}
        status, _, text = self.ask("/graphql", "POST", body, **self.headers, **own)
        assert status == 200, text
        return json.loads(text)["data"]

    def runs(self) -> int:
        return len(self.query(RUNS)["runsOrError"]["results"])

    def seen(self, look: Callable[[psutil.Process], Any]) -> list[Any]:
        """What `look` finds in each process of the UI. Workers come and go while they are
        listed, so one that has ended is passed over."""
        top = psutil.Process(self.process.pid)
        found = []
        for process in [top, *top.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                found.append(look(process))
        return found

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def command_line(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def tcp_connections(process: psutil.Process) -> list[Any]:
    return process.net_connections("tcp")


def wait(condition: Callable[[], Any], timeout_s: float = 240) -> Any:
    return Dagster.wait(condition, timeout_s, condition.__name__)


@pytest.fixture
def own_ui(tmp_path: Path) -> Iterator[Ui]:
    started = Ui(tmp_path)
    try:
        yield started
    finally:
        started.close()


def test_after_a_kill_the_ui_is_started_again_and_browser_and_run_go_on(own_ui: Ui) -> None:
    def daemons() -> set[int]:
        found = own_ui.seen(lambda process: (process.pid, process.cmdline()))
        return {pid for pid, words in found if "dagster._daemon" in words}

    launched = own_ui.query(LAUNCH, p=PARAMETERS)["launchRun"]["run"]["runId"]
    killed = daemons()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    wait(lambda: daemons() - killed)

    def has_succeeded() -> bool:
        with suppress(OSError, http.client.HTTPException):
            status = own_ui.query(RUN_STATUS, id=launched)["runOrError"]["status"]
            assert status not in ("FAILURE", "CANCELED")
            return status == "SUCCESS"
        return False

    wait(has_succeeded)
    started = own_ui.seen(lambda process: process.pid)
    own_ui.close()
    assert own_ui.process.returncode == 0
    wait(lambda: not [pid for pid in started if psutil.pid_exists(pid)])
    assert "the UI ended by itself and is started again" in own_ui.log.read_text()


@pytest.fixture(scope="module")
def ui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ui]:
    started = Ui(tmp_path_factory.mktemp("ui"))
    try:
        yield started
    finally:
        started.close()


PATHS = ("/", "/server_info", "/graphql", "/logs/x/y/err", "/robots.txt", "/download_debug/x")


@pytest.mark.parametrize("path", PATHS)
def test_who_has_no_token_reads_nothing(ui: Ui, path: str) -> None:
    assert ui.ask(path)[0] == 401
    assert ui.ask(f"{path}?token=")[0] == 401
    assert ui.ask(f"{path}?token={ui.token[:-1]}")[0] == 401
    assert ui.ask(path, Authorization="Bearer \xff", Cookie="nmoe-ui=x")[0] == 401


def test_who_has_no_token_asks_nothing(ui: Ui) -> None:
    for query in ("{version}", RUNS):
        body = json.dumps({"query": query})
        status, _, text = ui.ask("/graphql", "POST", body, **JSON)
        assert status == 401
        assert "printed" in text, "it says where the token is"
    with pytest.raises(InvalidStatus) as caught:
        connect(f"ws://127.0.0.1:{ui.port}/graphql", subprotocols=["graphql-ws"])  # pyright: ignore
    assert caught.value.response.status_code == 401


def test_the_address_signs_a_browser_in_by_a_cookie_that_scripts_and_sites_do_not_get(
    ui: Ui,
) -> None:
    status, headers, text = ui.ask(f"/?token={ui.token}", Sec_Fetch_Site="cross-site")
    assert status == 200
    assert ui.token not in text
    name, *attributes = headers["Set-Cookie"].lower().split("; ")
    assert str(ui.port) in name, "two servers on one machine have two cookies"
    assert {"httponly", "samesite=strict", "path=/"} <= set(attributes)
    assert not any(
        attribute.startswith(("domain", "max-age", "expires")) for attribute in attributes
    )
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"


def test_a_signed_in_browser_launches_runs_and_hears_of_them(ui: Ui) -> None:
    launched = ui.query(LAUNCH, p=PARAMETERS)["launchRun"]
    assert launched["__typename"] == "LaunchRunSuccess", launched
    run_id = launched["run"]["runId"]
    own = f"http://127.0.0.1:{ui.port}"
    with connect(
        f"ws://127.0.0.1:{ui.port}/graphql",
        origin=own,  # pyright: ignore
        subprotocols=["graphql-ws"],  # pyright: ignore
        additional_headers=ui.headers,
    ) as socket_:
        socket_.send('{"type": "connection_init"}')
        assert json.loads(socket_.recv(30)) == {"type": "connection_ack"}

    def ended() -> str:
        status = ui.query(RUN_STATUS, id=run_id)["runOrError"]["status"]
        return status if status in ("SUCCESS", "FAILURE") else ""

    assert wait(ended) == "SUCCESS"


def test_a_program_sends_the_token_as_bearer(ui: Ui) -> None:
    body = json.dumps({"query": "{version}"})
    assert ui.ask("/graphql", "POST", body, Authorization=f"Bearer {ui.token}", **JSON)[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 400),
        ({"Host": "127.0.0.1.evil.example:3000"}, 400),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "http://localhost"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site", "Sec_Fetch_Dest": "iframe"}, 403),
    ],
)
def test_foreign_hosts_and_origins_are_refused_though_the_browser_is_signed_in(
    ui: Ui, headers: dict[str, str], status: int
) -> None:
    body = json.dumps({"query": LAUNCH, "variables": {"p": PARAMETERS}})
    before = ui.runs()
    assert ui.ask("/graphql", "POST", body, **ui.headers, **JSON, **headers)[0] == status
    assert ui.ask("/", **ui.headers, **headers)[0] == status
    assert ui.runs() == before


def test_no_address_launches_a_run(ui: Ui) -> None:
    before = ui.runs()
    for headers in (ui.headers, {"Authorization": f"Bearer {ui.token}"}):
        status, _, text = ui.ask(LAUNCH_BY_ADDRESS, **headers)
        assert status == 405, text
        status, _, _ = ui.ask(LAUNCH_BY_ADDRESS, **headers, Accept="text/html")
        assert status == 200, "the page of GraphiQL, which asks nothing by itself"
    assert ui.runs() == before


def test_the_processes_of_the_ui_execute_no_file_of_the_project(ui: Ui) -> None:
    assert ui.planted.ran() == []


def test_the_token_is_in_no_command_line_and_the_files_are_the_users_own(ui: Ui) -> None:
    assert len(ui.token) >= 32
    commands = ui.seen(command_line)
    assert any("daemon" in command for command in commands)
    assert not any(ui.token in command for command in commands)
    holders = ui.seen(lambda process: ui.token in process.environ().values() and process.cmdline())
    # Not the daemon and the servers of code, whose environment runs inherit.
    assert {" ".join(words[1:3]) for words in holders if words} <= {
        "-W ignore:Function `dev_command` is superseded",
        "-m nmoe_assets.ops.webserver",
    }
    assert stat.S_IMODE(ui.home.stat().st_mode) == 0o700
    listening = set()
    for connections in ui.seen(tcp_connections):
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN:
                listening.add(connection.laddr.ip)
    assert listening == {"127.0.0.1"}


# What a page can try; each puts into `seen` what it could read.
ATTACKS = """
<script>
const ui = "http://127.0.0.1:PORT", launch = ui + LAUNCH, seen = [];
new Image().src = launch;
const all = [launch, ui + "/graphql?query={runsOrError{__typename}}", ui + "/"].flatMap(url => [
  fetch(url, {credentials: "include"}).then(r => r.text()).then(t => seen.push(t)),
  fetch(url, {method: "POST", mode: "no-cors", credentials: "include", body: "x"}),
  fetch(url, {method: "POST", credentials: "include", body: BODY,
              headers: {"Content-Type": "application/json"}}).then(() => seen.push("json")),
  new Promise(done => {
    const frame = document.createElement("iframe");
    frame.onload = () => {
      try { seen.push(frame.contentDocument.body.innerText) } catch {}; done() };
    document.documentElement.append(frame); frame.src = url }),
  new Promise(done => {
    const frame = document.createElement("iframe"); frame.name = "f" + Math.random();
    document.documentElement.append(frame);
    const form = document.createElement("form"); form.method = "POST"; form.action = url;
    form.target = frame.name; document.documentElement.append(form); form.submit();
    frame.onload = done; setTimeout(done, 3000) }),
]);
all.push(new Promise(done => {
  const socket = new WebSocket(ui.replace("http", "ws") + "/graphql", "graphql-ws");
  socket.onopen = () => { seen.push("socket"); done() }; socket.onerror = done }));
Promise.allSettled(all).then(() => document.body.append("all was tried; " +
  JSON.stringify(seen.filter(Boolean))));
</script><body></body>
"""


def _hostile_page(ui: Ui) -> type[BaseHTTPRequestHandler]:
    body = json.dumps({"query": LAUNCH, "variables": {"p": PARAMETERS}})
    page = ATTACKS.replace("PORT", str(ui.port)).replace("BODY", json.dumps(body))
    page = page.replace("+ LAUNCH", f"+ {json.dumps(LAUNCH_BY_ADDRESS)}")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def _attacked(page: Page, address: str) -> str:
    page.open(address, "all was tried; ")
    return str(page.evaluate("document.body.innerText")).partition("all was tried; ")[2]


@pytest.mark.skipif(chromium() is None, reason="needs a Chromium")
def test_a_hostile_page_in_the_browser_of_the_user_launches_and_reads_nothing(ui: Ui) -> None:
    before = ui.runs()
    with serving(_hostile_page(ui)) as (host, _), browser() as page:
        page.open(ui.address, "Runs")
        assert "token" not in str(page.evaluate("location.href"))
        port = host.rpartition(":")[2]
        for name in ("127.0.0.1", "localhost", "other.localhost"):
            assert _attacked(page, f"http://{name}:{port}/") == "[]", name
        page.open(f"http://127.0.0.1:{ui.port}/runs", "Runs")  # still signed in
    assert ui.runs() == before


@pytest.mark.skipif(chromium() is None, reason="needs a Chromium")
def test_the_browser_of_the_user_shows_the_pages_after_the_address_was_opened(ui: Ui) -> None:
    with browser() as page:
        page.open(f"http://127.0.0.1:{ui.port}/runs", "needs the token")
        page.open(ui.address, "Runs")
        page.open(f"http://127.0.0.1:{ui.port}/jobs", "prep")
