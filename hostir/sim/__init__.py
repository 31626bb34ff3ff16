"""Programs in simulated time: what each rank's streams would do, on machines that need not exist."""
