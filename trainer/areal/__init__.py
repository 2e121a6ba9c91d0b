"""AReaL's rollouts on our desktops. `trainer.areal.workflow.DesktopWorkflow` is what AReaL is given.

Nothing else here imports AReaL or torch before it is used, so all of it is tested without them.
"""
