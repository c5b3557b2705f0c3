"""The layerwise engine: alignments from each layer's own rule, at about the cost of one more forward pass."""
