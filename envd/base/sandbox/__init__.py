"""The sandbox of processes that handle data or code of guests: judge workers, and OSWorld's setups and evaluators."""
