"""Keep machines ready and grant them to runs by fair share."""
