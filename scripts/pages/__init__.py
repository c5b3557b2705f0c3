"""The generated parts of README and docs/, by what they are about."""
