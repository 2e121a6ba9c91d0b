"""The protocols that a drawn desktop speaks: RFB, guest agent, guestd."""
