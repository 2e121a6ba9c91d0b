"""Playing one sample, and what groups of samples are worth. Nothing here knows the job."""
