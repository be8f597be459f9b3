"""What only CPUs run: forwards that are compiled from C, and the number of their threads."""
