"""The agent: one loop, one prompt and one parser for training, evaluation and replay."""
