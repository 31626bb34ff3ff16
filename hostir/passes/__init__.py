"""Program to program, and sharded fusion to program: one file a pass. Pure functions of data; no torch."""
