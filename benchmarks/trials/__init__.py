"""Ideas for drafters that are tried out here before they may become part of the product, one a file."""
