"""Tools around decoding, each a package of its own behind one or more commands."""
