"""The entry of gqueue-server. Patches the standard library before anything else is loaded (R50)."""

from gevent import monkey

monkey.patch_all()

import os
import sys


def main() -> int:
    """Run the broker until it is told to stop; the exit code (surface 4)."""
    from gqueue import __version__
    from gqueue.errors import StartError
    from gqueue.server.app import run
    from gqueue.settings import Settings, usage

    argv = sys.argv[1:]
    if "--help" in argv or "-h" in argv:
        print(usage())
        return 0
    if "--version" in argv:
        print(f"gqueue-server {__version__}")
        return 0
    try:
        return run(lambda: Settings.load(argv, os.environ))
    except StartError as error:
        print(f"gqueue-server: {error}", file=sys.stderr)
        return error.code


if __name__ == "__main__":
    sys.exit(main())
