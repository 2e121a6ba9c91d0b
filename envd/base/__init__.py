"""What every room uses: configuration, errors, clock, asyncio helpers, database and telemetry."""
