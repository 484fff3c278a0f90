"""From a program to one that means the same and costs less, on any target."""
