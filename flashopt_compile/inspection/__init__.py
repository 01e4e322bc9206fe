"""An optimizer's bytes, health and lost updates."""
