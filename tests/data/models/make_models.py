"""Writes the files of this folder: python3 make_models.py (torch 2.15.0, safetensors 0.8.0)."""

import argparse

import torch
from safetensors.torch import save_file


class Net(torch.nn.Module):
    """A parameter of every kind of name: tied, with buffers of real numbers and of integers."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(40, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.hidden = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 40, bias=False)
        self.head.weight = self.embedding.weight


torch.manual_seed(1)
net = Net()
net.hidden.bfloat16()
state = net.state_dict()
torch.save(state, "state_dict.pt")
torch.save(
    {"epoch": 3, "seed": 2**70, "args": argparse.Namespace(lr=1e-3), "model_state_dict": state},
    "checkpoint.pt",
    pickle_protocol=4,
)
torch.save(net, "module.pt")
torch.save(state, "legacy.pt", _use_new_zipfile_serialization=False)
torch.save(
    {
        "weight": torch.zeros(4, 3, dtype=torch.float8_e4m3fn),
        "view": torch.zeros(6, 4).t()[1:3],  # 12 of the 24 numbers of its storage
        "count": torch.zeros(3, dtype=torch.uint16),
    },
    "types.pt",
)
torch.save({"weight": torch.zeros(2, 2), "sparse": torch.eye(3).to_sparse()}, "sparse.pt")
save_file(
    {
        "weight": torch.zeros(8, 5, dtype=torch.bfloat16),
        "bias": torch.zeros(8),
        "half": torch.zeros(3, dtype=torch.float16),
        "scalar": torch.tensor(1.0),
        "empty": torch.zeros(0, 4),
        "steps": torch.tensor([7]),
    },
    "reference.safetensors",
    {"format": "pt"},
)
