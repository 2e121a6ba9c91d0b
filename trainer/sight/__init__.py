"""Check, before a job, that engine and learner see the pixels of every turn."""
