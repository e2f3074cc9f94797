"""One file a revision, in order of its number."""
