"""Run an OSWorld runner, unmodified, on envd's machines.

Usage: `python -m envd.integrations.osworld.run RUNNER.py [ARGUMENT ...]`, in a checkout of OSWorld, for example
`python -m envd.integrations.osworld.run run.py --provider_name docker ...`. See `provider`.
"""

import runpy
import sys
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Run the script in the first argument as the main program, with the others as its arguments."""
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(__doc__)
        raise SystemExit(0 if arguments else 2)
    runner = Path(arguments[0])
    if not runner.is_file():
        raise SystemExit(f"runner {runner}: not a file; name a script of OSWorld's checkout, such as run.py")
    # The checkout has OSWorld's packages in its root, and runners in the root and below.
    above = runner.resolve().parents
    root = next((directory for directory in above if (directory / "desktop_env").is_dir()), above[0])
    sys.path.insert(0, str(root))
    # Late, so that it is the checkout's own DesktopEnv that gets the machines.
    import envd.integrations.osworld.provider  # noqa: F401, PLC0415

    sys.argv = arguments
    runpy.run_path(str(runner), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
