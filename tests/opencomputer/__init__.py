"""OpenComputer's tasks on real machines: oracles of ours, and its own evaluator next to envd's."""

# Sets a variable that gRPC reads when it is imported.
import envd  # noqa: F401
