#!/usr/bin/env python3
"""Trains two small nets on the 8x8 digits with the Python peers: train_reference.py > runs.jsonl

Everything random comes from the integer generator of ../golden/README.md, so another language can repeat a run:
 initial parameter number j of net with seed s: stream (s*16+j, 0), `u 24 bits`, exponent in `nets` below;
 order of epoch e (1-based): samples sorted by the 64-bit word draw(s*16+15, e)[i];
 test set: samples whose index is 4 modulo 5; pixels / 16; batches of 64, the short last one kept; mean cross entropy.
"""
import json, os, sys, warnings

warnings.filterwarnings("ignore")
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden"))
import numpy as np
import torch
import torch.nn.functional as F
from make_golden import draw, uniform

torch.set_num_threads(1)
from sklearn.datasets import load_digits

D = load_digits()
X = torch.from_numpy((D.data / 16).astype(np.float32))
Y = torch.from_numpy(D.target.astype(np.int64))
test = torch.arange(len(Y)) % 5 == 4
Xtr, Ytr, Xte, Yte = X[~test], Y[~test], X[test], Y[test]

nets = {  # (shape, exponent) in order; weights are U(-2^e, 2^e)
    "mlp": [([256, 64], -3), ([256], -3), ([10, 256], -4), ([10], -4)],
    "cnn": [([16, 1, 3, 3], -2), ([16], -2), ([32, 16, 3, 3], -4), ([32], -4), ([10, 128], -4), ([10], -4)],
}


def forward(net, p, x):
    if net == "mlp":
        return F.linear(F.relu(F.linear(x, p[0], p[1])), p[2], p[3])
    x = F.max_pool2d(F.relu(F.conv2d(x.view(-1, 1, 8, 8), p[0], p[1], padding=1)), 2)
    x = F.max_pool2d(F.relu(F.conv2d(x, p[2], p[3], padding=1)), 2)
    return F.linear(x.flatten(1), p[4], p[5])


def optimizers():
    import bitsandbytes as bnb
    from transformers.optimization import Adafactor as HF
    O = torch.optim
    yield "torch AdamW lr 1e-3", lambda p: O.AdamW(p)
    yield "torch Adafactor lr 1e-2 (defaults)", lambda p: O.Adafactor(p)
    yield "HF Adafactor defaults (relative step)", lambda p: HF(p)
    yield "HF Adafactor lr 1e-3, no scaling (trainer mode)", lambda p: HF(p, lr=1e-3, scale_parameter=False, relative_step=False)
    yield "HF Adafactor lr 1e-3, no scaling, beta1 0.9", lambda p: HF(p, lr=1e-3, scale_parameter=False, relative_step=False, beta1=0.9)
    yield "bnb Adam8bit lr 1e-3 (CPU)", lambda p: bnb.optim.Adam8bit(p)
    yield "bnb AdamW8bit lr 1e-3, all tensors 8-bit (CPU)", lambda p: bnb.optim.AdamW8bit(p, min_8bit_size=1)


def run(net, seed, make, epochs):
    p = []
    for j, (shape, e) in enumerate(nets[net]):
        v = uniform(draw(seed * 16 + j, 0, int(np.prod(shape))), 24, e)
        p.append(torch.nn.Parameter(torch.from_numpy(v.reshape(shape)).float()))
    opt = make(p)
    curve = {}
    for ep in range(1, epochs + 1):
        order = torch.from_numpy(np.argsort(draw(seed * 16 + 15, ep, len(Ytr)), kind="stable"))
        for i in range(0, len(order), 64):
            b = order[i:i + 64]
            opt.zero_grad(set_to_none=True)
            F.cross_entropy(forward(net, p, Xtr[b]), Ytr[b]).backward()
            opt.step()
        if ep in (1, 5, 10, epochs):
            with torch.no_grad():
                curve[ep] = [F.cross_entropy(forward(net, p, Xtr), Ytr).item(),
                             (forward(net, p, Xte).argmax(1) == Yte).float().mean().item()]
    return curve


if __name__ == "__main__":
    for net, epochs in (("mlp", 20), ("cnn", 20)):
        for name, make in optimizers():
            for seed in range(1, 6):
                print(json.dumps(dict(net=net, optimizer=name, seed=seed, curve=run(net, seed, make, epochs))), flush=True)
