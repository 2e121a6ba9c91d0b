"""What a model reads and writes as token ids: rows that only grow, made by its own chat template and processor."""
