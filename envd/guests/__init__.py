"""Everything that runs inside guests. Imports nothing of envd."""
