"""How far to draft: as far as it pays, learned from what cycles cost and from how many guesses are accepted."""
