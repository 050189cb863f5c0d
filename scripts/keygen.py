"""``keygen``: keys of the control plane for a gateway and nodes on several machines."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError, reason_of
from common.wire.key_folder import write_folders

HELP = """Make a folder of keys for each host. The first host runs the gateway; its
folder serves for nodes there, too.

  baton keygen keys host-a host-b       makes keys/host-a and keys/host-b
  baton gateway --keys keys/host-a ...  on host-a
  baton decode --keys keys/host-b ...   on host-b

Copy each folder to its host over a secure connection, and no other. Run it
again with the same folder to add hosts: the folders of the others then permit
the new one, once their "nodes" folders are copied again and their gateway and
nodes are restarted."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="baton keygen", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to make a folder for each host")
    parser.add_argument("hosts", nargs="+", metavar="HOST", help="name of the folder of a host")
    options = parser.parse_args(argv)
    try:
        folders = write_folders(options.folder, options.hosts)
    except ConfigError as error:
        print(f"keygen: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"keygen: cannot write {error.filename or options.folder}: {reason_of(error)}", file=sys.stderr)
        return 2
    for folder in folders:
        runs = "gateway and nodes" if (folder / "gateway.key_secret").exists() else "nodes"
        print(f"{folder}: {runs} of {folder.name}")
    return 0
