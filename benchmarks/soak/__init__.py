"""One engine under load for long, with cancellations and faults of every part, and answers that must not change."""
