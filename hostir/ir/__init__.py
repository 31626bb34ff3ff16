"""Host programs: statements over buffers, their text, and the checks that need neither torch nor a GPU."""
