"""``unicron dashboard``: the address of the coordinator's page, with a code that opens it once."""

from __future__ import annotations

import argparse
import json
import webbrowser

from unicron_lightning.cli.client import access_of, answering, fetch


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``unicron``."""
    parser = commands.add_parser("dashboard", parents=[answering()], help="open the coordinator's page in a browser")
    parser.add_argument("--open", action="store_true", help="start the browser of this machine")
    parser.set_defaults(run=_dashboard)


def _dashboard(options: argparse.Namespace) -> int:
    access = access_of(options)
    answer = fetch(options.endpoint, "/v1/dashboard/code", access, method="POST")
    status = fetch(options.endpoint, "/v1/status", access)["coordinator"]
    scheme = "https" if status["encrypted"] else "http"
    # Browsers send no server the part behind "#", so that the code is in no log; the page removes it from the address.
    address = f"{scheme}://{options.endpoint}/dashboard#code={answer['code']}"
    if options.json:
        print(json.dumps({"address": address, "seconds": answer["seconds"]}, indent=2))
    else:
        print(f"{address}\nIt opens the page once, within {answer['seconds'] / 60:.0f} minutes.")
    if options.open:
        webbrowser.open(address)
    return 0
