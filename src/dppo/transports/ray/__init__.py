"""Ray itself: connect to it or start it, check its room, notice its death."""
