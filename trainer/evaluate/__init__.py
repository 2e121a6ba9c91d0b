"""How good a model is: episodes on held-out tasks, played exactly as in training, counted with honest intervals."""
