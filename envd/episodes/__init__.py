"""Episodes: life cycle, exactly-once ledger, leases."""
