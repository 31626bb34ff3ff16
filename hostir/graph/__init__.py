"""Device graphs: what a unit computes, from one table of operations. Nothing here imports torch."""
