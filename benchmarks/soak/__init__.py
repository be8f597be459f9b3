"""One engine under load for long: cancellations, faults of every part, and answers that must not change."""
