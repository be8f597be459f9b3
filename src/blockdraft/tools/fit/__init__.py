"""A drafter for any target by one command: what is there, what to do about it, and the commands that do it."""
