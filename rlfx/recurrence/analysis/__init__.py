"""What follows from a program: dependences, legality, costs, what to keep."""
