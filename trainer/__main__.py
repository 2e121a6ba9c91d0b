"""`python -m trainer`, for where the console script is not on the path."""

from trainer.cli import main

main()
