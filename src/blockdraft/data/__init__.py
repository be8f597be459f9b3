"""Training data: records of conversations or text become tokens and masks; the target's answers and features on
disk."""
