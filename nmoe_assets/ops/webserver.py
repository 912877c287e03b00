"""`python -m nmoe_assets.ops.webserver`: `dagster-webserver` behind the gate, with its options.

`dev` before the options starts `dagster dev` with this webserver. `NMOE_UI_TOKEN` is the token; if
it is unset, the printed address has a new one. `NMOE_UI_HOSTS` has additional host names under
which browsers reach the server, separated by commas.
"""

import argparse
import os
import runpy
import secrets
import sys
from typing import Any

import uvicorn

from nmoe_assets.dagster_private import change_commands_of_dev
from nmoe_assets.ops.gate import LOOPBACK, gated
from nmoe_assets.ops.pictures import with_pictures
from nmoe_assets.ops.restarts import NEW_TOKEN

# The address for Dagster's webserver. No server can listen on it, so without the gate Dagster
# serves nothing.
_NOWHERE = "nmoe.invalid"
_TOKENS = ("NMOE_UI_TOKEN", NEW_TOKEN)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--host", default="127.0.0.1")
    parser.add_argument("-p", "--port", default="3000")
    known, others = parser.parse_known_args()
    sys.argv[1:] = [*others, "--host", _NOWHERE, "--port", known.port]
    if others[:1] == ["dev"]:
        own = "nmoe_assets.ops.webserver"
        # The processes of runs do not inherit the token.
        tokens = {name: os.environ.pop(name) for name in _TOKENS if name in os.environ}
        change_commands_of_dev({"dagster_webserver": own, _NOWHERE: known.host}, tokens)
        runpy.run_module("dagster", run_name="__main__", alter_sys=True)
        return
    _put_gate_before(known.host)
    runpy.run_module("dagster_webserver", run_name="__main__", alter_sys=True)


def _put_gate_before(host: str) -> None:
    """Let each app that uvicorn runs listen on this host, behind the gate."""
    run = uvicorn.run
    given = os.environ.pop("NMOE_UI_TOKEN", "").strip()
    token = given or os.environ.pop(NEW_TOKEN, "") or secrets.token_urlsafe(24)
    names = os.environ.get("NMOE_UI_HOSTS", "").replace(" ", "").split(",")
    hosts = [*LOOPBACK, host, *filter(None, names)]

    def run_gated(app: Any, **settings: Any) -> None:
        shown = "$NMOE_UI_TOKEN" if given else token
        print(f"http://{host}:{settings['port']}/?token={shown}", flush=True)
        # without this option, the log would contain the token
        settings |= {"host": host, "access_log": False}
        run(gated(with_pictures(app), token, hosts), **settings)

    uvicorn.run = run_gated


if __name__ == "__main__":
    main()
