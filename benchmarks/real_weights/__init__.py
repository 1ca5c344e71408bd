"""Models that other people trained, from packages of the package index, and edits of them."""
