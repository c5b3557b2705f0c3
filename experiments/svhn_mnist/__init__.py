"""The paper's Table 2: SVHN digits to a handful of MNIST digits."""
