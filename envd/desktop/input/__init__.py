"""Actions and the input events that perform them."""
