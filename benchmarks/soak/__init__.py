"""One engine under load, with cancellations and faults; its output must not change."""
