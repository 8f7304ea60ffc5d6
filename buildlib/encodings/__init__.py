"""What each tensor's integers mean: encodings files, and encodings that travel with a graph."""
