"""What a method is given to train, the losses of the two modes, and guards against non-finite losses."""
