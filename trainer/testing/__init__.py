"""What the trainer's own tests stand on, and what others may test their parts with."""
