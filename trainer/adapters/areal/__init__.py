"""AReaL's rollouts on our desktops: `trainer.adapters.areal.workflow.DesktopWorkflow`.

Except for `workflow` and `train`, modules import neither AReaL nor torch before use, so they are testable without them.
"""
