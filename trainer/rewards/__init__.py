"""What an episode is worth to the learner, and why."""
