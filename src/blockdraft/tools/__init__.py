"""Tools around decoding, each a package of its own with a command of the same name or several."""
