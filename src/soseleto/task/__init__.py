"""The task that a method trains, the losses of the two modes, and guards against non-finite losses."""
