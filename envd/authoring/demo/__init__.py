"""The group of episodes that `envd demo` plays, and its report."""
