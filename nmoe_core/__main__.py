"""`nmoe`, and `python -m nmoe_core`: imports little before it can be interrupted in one line."""

import signal
import sys

from nmoe_core.base.interrupts import terminate


def main() -> int:
    """Run the command line; return its exit status."""
    signal.signal(signal.SIGTERM, terminate)
    try:
        from nmoe_core.cli import main as run

        return run()
    except KeyboardInterrupt:  # while modules are imported
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
