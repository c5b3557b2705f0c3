"""The run folder: everything one training leaves behind, and how it is read."""
