"""A registry with many functions, in a directory and in a bucket."""
