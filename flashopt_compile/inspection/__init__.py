"""What an optimizer holds and how sound it is: bytes, health, lost updates."""
