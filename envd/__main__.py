"""`python -m envd` is the `envd` command."""

from envd.cli import main

if __name__ == "__main__":
    main()
