"""The inside of one guest: screen, input, agent, guestd."""
