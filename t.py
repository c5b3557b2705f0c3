import torch
from torch import nn
from soseleto.compare import compare
x = torch.randn(120, 2); y = (x[:, 0] > 0).long()
c = compare(nn.Linear(2, 2), (x, y), (x[:12], y[:12]), folds=2, epochs=1, device="cpu", progress=True)
print(c); print(repr(c), c.kept.predict(x[:3]), c.result.weights[:3])
c = compare(lambda: nn.Sequential(nn.Linear(2, 4), nn.ReLU()), (x, y), (x[:12], y[:12]), "transfer", folds=2, epochs=1, device="cpu", progress=True)
print(c); 
