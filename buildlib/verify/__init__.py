"""Does a build still compute what its source computes? Each stage is run before and after."""
