"""Contract suites of hypervisor backends: a backend passes them unchanged."""
