"""E2B's interface: its control plane, and the services inside its sandboxes, on episodes of the daemon."""
